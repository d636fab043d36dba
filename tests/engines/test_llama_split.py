"""Real llama-servers split requests as if whole, and clients may leave at any time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.testing.raw_client import RawClient
from tests.engines.conftest import MODEL
from tests.engines.llama_boxes import (
    CHAT,
    COMPLETIONS,
    OUTPUT_TOKENS,
    SPLIT,
    STORY,
    WAIT_S,
    WHOLE,
    WORDS,
    Box,
    Pair,
    box,
    free,
    paired,
    routed,
    text_of,
    two_boxes,
)

AS_GOOD_AS_EQUAL = 0.1  # of log probability; rounding moves it by some hundredths
QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "How do plants make their food?",
    "Write a line about the sea.",
    "Name three animals of the desert.",
    "How does a bicycle stay upright?",
    "What is a prime number?",
    "Who wrote the first computer program?",
    "How far away is the moon?",
)


@pytest.fixture(scope="module")
def boxes(model_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Box, Box]]:
    with two_boxes(tmp_path_factory.mktemp("llama"), model_gguf) as both:
        yield both


@pytest.fixture
async def pair(boxes: tuple[Box, Box]) -> AsyncIterator[Pair]:
    async with paired(*boxes) as served:
        yield served


def thirty_requests() -> list[tuple[str, dict[str, Any]]]:
    """Texts of 8 to 55 tokens with different beginnings, and chats."""
    pieces = [WORDS[7 * n % 60 : 7 * n % 60 + 6 + 2 * n] for n in range(21)]
    texts = [(COMPLETIONS, {"prompt": " ".join(piece)}) for piece in pieces]
    chats = [(CHAT, {"messages": [{"role": "user", "content": each}]}) for each in QUESTIONS]
    assert len(texts) + len(chats) == 30
    return [*texts, *chats]


async def test_thirty_prompts_are_answered_as_if_whole(pair: Pair) -> None:
    """Where a processor rounds one token alone otherwise than many, texts may part at a tie."""
    parted = []
    for path, body in thirty_requests():
        pair.d.forget()
        whole = await pair.whole(path, {**body, "logprobs": path == CHAT or 2, "top_logprobs": 2})
        told = await pair.split(path, body)
        if text_of(told) != text_of(whole):
            parted.append((body, margin_where_they_part(whole, text_of(told))))
    assert [each for each in parted if each[1] > AS_GOOD_AS_EQUAL] == []
    assert len(parted) <= 3, parted


async def test_a_long_prompt_is_answered_as_on_one_server(pair: Pair) -> None:
    """Strictly: in the same pieces, so that nothing but the transfer is between the two."""
    for words in (80, 95, 110):
        body = {"prompt": " ".join(WORDS[:words])}
        told = await pair.split(COMPLETIONS, body)
        assert text_of(told) == pair.d.in_two_pieces(body["prompt"])


def margin_where_they_part(whole: dict[str, Any], other: str) -> float:
    """By how much the whole run preferred its token to the next best one, where `other` parts."""
    text = ""
    for token in whole["choices"][0]["logprobs"]["content"]:
        text += token["token"]
        if not other.startswith(text):
            best, second = (each["logprob"] for each in token["top_logprobs"][:2])
            return float(best - second)
    raise AssertionError("they do not part")


async def test_streams_at_once(pair: Pair) -> None:
    """More of them than slots, of both plans: all whole, none computed twice."""
    bodies = [{"prompt": f"{n}. {' '.join(WORDS[:20])}", "stream": True} for n in range(8)]
    plans = [SPLIT, SPLIT, SPLIT, WHOLE] * 2
    answers = await asyncio.gather(
        *(pair.ask(COMPLETIONS, body, plan) for body, plan in zip(bodies, plans, strict=True))
    )
    for answer, plan in zip(answers, plans, strict=True):
        assert answer.text.endswith("data: [DONE]\n\n")
        assert answer.headers["x-splitserve-plan"] == plan["x-splitserve-plan"]
        record = await pair.router.record(answer)
        assert record["actual"]["output_tokens"] == OUTPUT_TOKENS
        assert record["actual"]["recomputed_tokens"] in (0, None)


PROMPT = {"prompt": " ".join(WORDS[:24])}
# --- clients that leave --------------------------------------------------------------------------

LONG = {"model": MODEL, "prompt": STORY * 2, "max_tokens": 200, "temperature": 0, "stream": True}
LEAD = ("x-splitserve-plan: disaggregated",)


async def leave(pair: Pair, when: Callable[[RawClient], Any]) -> None:
    """Ask, leave when `when` returns, and see the next request served in the same slots."""
    async with RawClient(pair.router.url) as client:
        client.post(COMPLETIONS, json.dumps(LONG).encode(), LEAD)
        await when(client)
    await pair.router.until(lambda: pair.router.app.dispatcher.live == 0, WAIT_S)
    await free(pair.router, pair.p, pair.d)
    answer = await pair.ask(COMPLETIONS, PROMPT, SPLIT)
    assert answer.headers["x-splitserve-plan"] == "disaggregated"


async def test_a_client_that_leaves_during_prefill(pair: Pair) -> None:
    async def busy(_: RawClient) -> None:
        async with asyncio.timeout(WAIT_S), httpx.AsyncClient(timeout=WAIT_S) as client:
            while not any(
                slot["is_processing"] for slot in (await client.get(f"{pair.p.url}/slots")).json()
            ):
                pass

    await leave(pair, busy)


async def test_a_client_that_leaves_during_the_transfer(pair: Pair) -> None:
    backends: Any = pair.router.app.dispatcher.backends
    courier = backends["d"]._standing._courier
    pull, begun = courier.pull, asyncio.Event()

    async def slow(parcel: Any) -> None:
        begun.set()
        courier.pull = pull
        await asyncio.Event().wait()

    courier.pull = slow

    async def moving(_: RawClient) -> None:
        await asyncio.wait_for(begun.wait(), WAIT_S)

    await leave(pair, moving)


async def test_a_client_that_leaves_in_mid_answer(pair: Pair) -> None:
    async def speaking(client: RawClient) -> None:
        await client.until(b'"text"', WAIT_S)

    await leave(pair, speaking)


# --- servers that cannot -------------------------------------------------------------------------


async def test_flags_that_would_lose_kv_are_refused_by_name(
    model_gguf: Path, tmp_path: Path, boxes: tuple[Box, Box]
) -> None:
    _, d = boxes
    with (
        box("wiped", tmp_path, model_gguf) as wiped,
        box("other", tmp_path, model_gguf, "--parallel", 2, "--flash-attn", "off") as other,
    ):
        workers = wiped.entry("prefill"), other.entry("prefill"), d.entry("decode")
        async with routed(*workers) as router:
            told = (await router.client.get("/admin/workers")).json()["workers"]
            by_name = {worker["id"]: worker for worker in told}
            assert "--no-cache-idle-slots" in by_name["wiped"]["why_whole"]
            assert by_name["other"]["why_whole"] is None
            refused = {pair["with"]: pair["why_not"] for pair in by_name["d"]["pairs"]}
            assert "streams (2 / 1)" in refused["other"]
            assert "v_order (columns / rows)" in refused["other"]
