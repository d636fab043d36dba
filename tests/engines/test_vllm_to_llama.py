"""vLLM prefills and llama.cpp decodes: real engines, real weights, through the router.

Both compute with the same weights: llama.cpp's file is the model's own, with its quantised weights
written out as float16, and vLLM runs in float32. llama-server must compute nothing of a prompt but
its last token, and what it says is laid before vLLM, token by token.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import httpx
import numpy as np
import pytest
from gguf.quants import dequantize

from benchmarks.engines.vllm_cpu import VllmServer, VllmSpec, example
from benchmarks.engines.vllm_cpu import running as vllm_running
from benchmarks.process_tree import free_port
from router.testing.loopback_router import LoopbackRouter
from tests.engines.conftest import program, running
from workers.courier.testing.served_courier import ServedCourier

MODEL = "smollm2-135m"
OUTPUT_TOKENS = 32
AT_ONCE = 3
LEAST_EQUAL = 27
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SPLIT = {"x-splitserve-plan": "disaggregated"}
STORY = (
    "The lighthouse stood at the end of a long stone pier, and every evening an old keeper climbed "
    "its two hundred steps with a can of oil. He counted ships, wrote down the wind, and told "
    "nobody what he saw when the fog came in. One winter a boat without lamps drifted past, and in "
    "it sat a woman who read a book as if she were at home by the fire. He called to her; she "
    "turned a page. In the morning the sea was flat as a table, and on the lowest step lay a dry "
    "and open book, written in a hand that he knew to be his own. He took it up to the lamp room "
    "and read until noon. It told of a keeper who had left his light one night to follow a boat, "
    "and of the ships that were lost on the rocks because of it. He closed the book, cleaned the "
    "glass of the lamp, and decided that he would never sleep again while it was dark. "
)
WORDS = STORY.split()
QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "How do plants make their food?",
    "Write a short poem about the sea.",
    "Explain what a computer program is to a child.",
    "Name three animals that live in the desert.",
    "What should I pack for a week in the mountains?",
    "How does a bicycle stay upright?",
    "Give me a recipe for vegetable soup.",
    f"What did the old keeper of the lighthouse find? {STORY}",
)


@dataclass(frozen=True, slots=True)
class Engines:
    """A vLLM that prefills and a llama-server that decodes, with a courier that converts."""

    vllm: VllmServer
    shared: Path
    llama_url: str
    courier: ServedCourier

    def router(self) -> LoopbackRouter:
        kv = {"connector": "example", "folder": str(self.shared)}
        return LoopbackRouter(
            {"url": self.vllm.url, "name": "p", "role": "prefill", "kv": kv},
            {"url": self.llama_url, "name": "d", "role": "decode", "courier": self.courier.url},
        )

    async def ask_vllm(self, path: str, body: dict[str, Any]) -> Any:
        """vLLM's own answer, without the router."""
        async with httpx.AsyncClient(base_url=self.vllm.url, timeout=300.0) as client:
            answer = await client.post(path, json={"model": MODEL, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()


def as_float16(source: Path, target: Path) -> None:
    """Write a GGUF file's weights out as float16, and what is no matrix as float32."""
    reader = gguf.GGUFReader(str(source))
    known = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    architecture = known.pop("general.architecture").contents()
    writer = gguf.GGUFWriter(target, architecture)
    del known["general.file_type"], known["general.quantization_version"]
    for name, field in known.items():
        inner = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], inner)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    for tensor in reader.tensors:
        numbers = dequantize(tensor.data, tensor.tensor_type)
        matrix = numbers.ndim > 1
        writer.add_tensor(tensor.name, numbers.astype(np.float16 if matrix else np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def engines(
    model_folder: Path, model_gguf: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    home = tmp_path_factory.mktemp("across")
    shared, slots, weights = home / "shared", home / "slots", home / "float16.gguf"
    shared.mkdir()
    as_float16(model_gguf, weights)
    port = free_port()
    names = ("--model", weights, "--alias", MODEL, "--host", "127.0.0.1", "--port", port)
    size = ("--threads", 1, "--ctx-size", 4096, "--parallel", 4, "--kv-unified", "--no-ui")
    split = ("--flash-attn", "on", "--no-cache-idle-slots", "--slot-save-path", slots)
    spec = VllmSpec("p", example("kv_producer", shared), flags=("--dtype", "float32"))
    with (
        ServedCourier(slots, model=weights, examples=shared) as courier,
        running("llama-server", port, program("llama-cpp"), *names, *size, *split) as llama_url,
        vllm_running([spec], model_folder, MODEL) as (vllm,),
    ):
        yield Engines(vllm, shared, llama_url, courier)


def thirty_requests() -> list[dict[str, Any]]:
    """Beginnings of a story, to be gone on with, and questions to a chat model."""
    lengths = range(12, 12 + 20 * 7, 7)
    texts = [{"prompt": " ".join(WORDS[:length])} for length in lengths]
    chats = [{"messages": [{"role": "user", "content": each}]} for each in QUESTIONS]
    assert len(texts) + len(chats) == 30
    return [*texts, *chats]


@dataclass(frozen=True, slots=True)
class Answered:
    """A prompt's ids by vLLM's tokenizer, and the ids that llama-server went on with."""

    ids: list[int]
    went_on: list[int]


async def answered(engines: Engines, router: LoopbackRouter, prompt: dict[str, Any]) -> Answered:
    """Split one request; llama-server must have found all of its KV but the last token's."""
    ids = (await engines.ask_vllm("/tokenize", prompt))["tokens"]
    body = {"model": MODEL, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "logprobs": 1, **prompt}
    if "messages" in prompt:
        body |= {"logprobs": True, "top_logprobs": 1}
    path = CHAT if "messages" in prompt else COMPLETIONS
    answer = await router.client.post(path, json=body, headers=SPLIT)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-splitserve-workers"] == "prefill=p,decode=d"
    record = await router.record(answer)
    assert (record["attempts"], record["failures"]) == (1, [])
    told = answer.json()
    assert (told["timings"]["prompt_n"], told["timings"]["cache_n"]) == (1, len(ids) - 1)
    return Answered(ids, [each["id"] for each in told["choices"][0]["logprobs"]["content"]])


async def ranks(engines: Engines, answers: list[Answered]) -> list[list[int]]:
    """How probable vLLM holds each token that llama-server said: 1 is what it would have said."""
    prompts = [each.ids + each.went_on for each in answers]
    body = {"prompt": prompts, "max_tokens": 1, "prompt_logprobs": 1}
    choices = (await engines.ask_vllm(COMPLETIONS, body))["choices"]
    found = []
    for each, choice in zip(answers, choices, strict=True):
        told = choice["prompt_logprobs"][len(each.ids) :]
        found.append([at[str(token)]["rank"] for at, token in zip(told, each.went_on, strict=True)])
    return found


async def test_thirty_prompts_cross_from_vllm_to_llama_cpp(engines: Engines) -> None:
    turn = asyncio.Semaphore(AT_ONCE)

    async def one(prompt: dict[str, Any]) -> Answered:
        async with turn:
            return await answered(engines, router, prompt)

    async with engines.router() as router:
        router.client.timeout = 120.0
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(prompt)) for prompt in thirty_requests()]
        await router.idle()
        text = (await router.client.get("/metrics")).text
        assert "\nsplitserve_handoff_recomputes_total 0.0\n" in text
    assert engines.courier.files() == []
    assert list(engines.shared.iterdir()) == []
    answers = [task.result() for task in tasks]
    by_answer = await ranks(engines, answers)
    first = sum(each[0] == 1 for each in by_answer)
    flat = [rank for each in by_answer for rank in each]
    top = sum(rank == 1 for rank in flat)
    print(  # noqa: T201 - what the run is for
        f"\nfirst token vLLM's own: {first} of 30; of {len(flat)} tokens {top} "
        f"({top / len(flat):.1%}) are vLLM's first choice, lowest rank {max(flat)}"
    )
    assert first >= LEAST_EQUAL


async def test_a_streamed_chat_crosses_over(engines: Engines) -> None:
    body = {
        "model": MODEL,
        "max_tokens": 8,
        "temperature": 0,
        "messages": [{"role": "user", "content": " ".join(WORDS[:90])}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with engines.router() as router:
        router.client.timeout = 120.0
        answer = await router.client.post(CHAT, json=body, headers=SPLIT)
        await router.idle()
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    usage = json.loads(events[-1])["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1
