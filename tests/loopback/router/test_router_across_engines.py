"""vLLM prefills for llama.cpp: fake servers with real files between them, a real courier."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter

from router.backends.vllm_filler import with_filler
from router.testing.connection import RecordedRequest
from router.testing.fake_llama import FakeLlama
from router.testing.fake_vllm import FakeVllm
from router.testing.loopback_router import LoopbackRouter
from router.testing.vllm_kv import KvEngine, Prompt
from splitserve.messages import HandoffReady
from workers.courier.example_folder import folder_of, stored_tokens
from workers.courier.testing.served_courier import ServedCourier

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
IDS = [1 + 7 * number % 101 for number in range(40)]
BODY = {"model": "m", "prompt": IDS, "max_tokens": 3, "temperature": 0.3, "n": 1}
SPLIT = {"x-splitserve-plan": "disaggregated"}


@dataclass(frozen=True, slots=True)
class Across:
    """A router before a fake vLLM `p` and a fake llama-server `d`."""

    router: LoopbackRouter
    p: FakeVllm
    d: FakeLlama
    courier: ServedCourier
    shared: Path

    async def ask(self, path: str, body: dict[str, Any]) -> Any:
        answer = await self.router.client.post(path, json=body, headers=SPLIT)
        assert answer.status_code == 200, answer.text
        return answer

    async def clean(self) -> None:
        """Nothing is left, and no answer was made from another prompt's KV."""
        await self.router.idle()
        await self.d.until(lambda _: self.d.busy == 0)
        assert not self.d.aborted
        assert self.d.wrong_answers == 0
        await self.router.until(lambda: self.courier.files() == [])

    def sent(self) -> list[RecordedRequest]:
        """What the prefill worker was asked for."""
        return [each for each in self.p.requests if each.method == "POST"]


def weights(folder: Path) -> Path:
    """A llama of one layer with one KV head of four numbers, which is the fake's row of KV."""
    path = folder / "model.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_embedding_length(4)
    writer.add_head_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_files(shared: Path, ids: list[int], block_tokens: int) -> None:
    """What vLLM would leave, if a token's KV were what the fake llama-server takes it for."""
    stored = ids[: stored_tokens(len(ids), block_tokens)]
    rows = np.frombuffer(b"".join(struct.pack("<q", each) for each in stored), "<f2")
    keys = rows.reshape(-1, 4)[:, [0, 2, 1, 3]].astype(np.float32)  # halves of a head, not pairs
    blocks = keys.reshape(-1, block_tokens, 4)
    memory = np.concatenate([blocks.swapaxes(1, 2).reshape(len(blocks), -1)] * 2, axis=1)
    memory[:, 4 * block_tokens :] = blocks.reshape(len(blocks), -1)
    shape, data = (len(stored), 1, 8), memory.tobytes()
    entry = {"dtype": "F32", "shape": shape, "data_offsets": [0, len(data)]}
    header = json.dumps({"kv_cache": entry}).encode()
    folder = folder_of(shared, ids, block_tokens)
    folder.mkdir()
    path = folder / "model.layers.0.self_attn.attn.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


@contextlib.asynccontextmanager
async def across(home: Path) -> AsyncIterator[Across]:
    shared = home / "shared"
    shared.mkdir()
    async with FakeVllm("example") as p, FakeLlama(folder=home / "slots") as d:
        with ServedCourier(home / "slots", model=weights(home), examples=shared) as courier:
            kv = {"connector": "example", "folder": str(shared)}
            workers = (
                {"url": p.url, "name": "p", "role": "prefill", "kv": kv},
                {"url": d.url, "name": "d", "role": "decode", "courier": courier.url},
            )
            async with LoopbackRouter(*workers) as router:
                yield Across(router, p, d, courier, shared)


@pytest.fixture
async def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Across]:
    def save(_: KvEngine, prompt: Prompt, block_tokens: int) -> None:
        write_files(tmp_path / "shared", json.loads(prompt.text), block_tokens)

    monkeypatch.setattr(KvEngine, "save_files", save)
    async with across(tmp_path) as served:
        yield served


async def test_all_but_the_last_token_comes_from_vllm(pair: Across) -> None:
    answer = await pair.ask(COMPLETIONS, BODY)
    assert answer.headers["x-splitserve-workers"] == "prefill=p,decode=d"
    timings = answer.json()["timings"]
    assert (timings["cache_n"], timings["prompt_n"]) == (len(IDS) - 1, 1)
    record = await pair.router.record(answer)
    assert record["failures"] == []
    assert record["actual"]["recomputed_tokens"] == 0
    assert record["actual"]["transfer_bytes"] > 0
    await pair.clean()
    assert list(pair.shared.iterdir()) == [], "nobody else can use these files"


async def test_the_prefill_worker_is_sent_ids_and_filler(pair: Across) -> None:
    for _ in range(2):
        await pair.ask(COMPLETIONS, BODY)
    ready = [each for each, _ in pair.router.steps if isinstance(each, HandoffReady)]
    bodies = [json.loads(each.body) for each in pair.sent()]
    assert bodies[0]["prompt"] != bodies[1]["prompt"], "each hand-off has files of its own"
    for event, body in zip(ready, bodies, strict=True):
        sent = with_filler(IDS, 16, 4096, event.handoff.handoff_id)
        assert body == {
            "model": "m",
            "prompt": sent,
            "max_tokens": 1,
            "stream": False,
            "return_token_ids": True,
        }
        claim = json.loads(event.handoff.attributes)
        assert claim["prompt_tokens"] == len(IDS)
        assert claim["folder"] == str(pair.shared)
        assert claim["block_tokens"] == 16
    await pair.clean()


@pytest.mark.parametrize(
    "path,prompt",
    [
        (COMPLETIONS, {"prompt": "a river runs below the old stone bridge"}),
        (CHAT, {"messages": [{"role": "user", "content": "where does the river run to?"}]}),
    ],
)
async def test_text_is_tokenized_by_the_prefill_worker(
    pair: Across, path: str, prompt: dict[str, Any]
) -> None:
    await pair.ask(path, {"model": "m", "max_tokens": 3, **prompt})
    asked, prefilled = pair.sent()
    assert (asked.path, prefilled.path) == ("/tokenize", COMPLETIONS)
    assert json.loads(asked.body) == {"model": "m", "max_tokens": 3, **prompt}
    ids = json.loads(prefilled.body)["prompt"]
    assert ids[:3] == [0, 1, 2], "the fake's tokenizer counts"
    assert "messages" not in json.loads(prefilled.body)


async def test_other_tokens_than_llama_cpps_own_are_found_out(pair: Across) -> None:
    # Two tokenizers that disagree: the fakes have nothing in common.
    answer = await pair.ask(COMPLETIONS, {"model": "m", "max_tokens": 3, "prompt": "a b c " * 20})
    record = await pair.router.record(answer)
    assert record["actual"]["recomputed_tokens"] > 0
    text = (await pair.router.client.get("/metrics")).text
    assert "\nsplitserve_handoff_recomputes_total 1.0\n" in text
    await pair.clean()


async def test_images_are_not_split(pair: Across) -> None:
    content = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    body = {"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 3}
    answer = await pair.router.client.post(CHAT, json=body)
    assert answer.status_code == 200
    assert answer.headers["x-splitserve-plan"] == "aggregated"
    record = await pair.router.record(answer)
    assert "images and audio are not in a prompt's token ids" in record["failures"][0]
    await pair.clean()


async def test_kv_that_was_not_stored_is_computed_where_it_is_needed(tmp_path: Path) -> None:
    async with across(tmp_path) as pair:
        answer = await pair.router.client.post(COMPLETIONS, json=BODY)
        assert answer.status_code == 200
        assert answer.headers["x-splitserve-plan"] == "aggregated"
        record = await pair.router.record(answer)
        assert any("no KV of this prompt" in each for each in record["failures"])
        await pair.clean()
