"""Speeds out of what a worker's answers take, on a clock that the worker moves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import pytest

from router.backends.base import BackendCall, PrefillDone
from router.backends.speed_probe import LONG_WORDS, OUTPUT_TOKENS, CannotMeasure, measure
from router.upstream import UpstreamResponse
from router.usage import TokenCounts
from router.wire import Headers
from splitserve.messages import Failure, Handoff, WorkerSnapshot

TEMPLATE_TOKENS = 20


@dataclass
class Clock:
    """A clock that stands still but for what the worker takes."""

    now_s: float = 100.0


@dataclass
class Timed:
    """A worker that takes as long as it says."""

    clock: Clock
    prefill_tok_s: float = 1000.0
    decode_tok_s: float = 50.0
    fixed_s: float = 0.03
    loading_s: float = 9.0
    usage: bool = True
    one_piece: bool = False
    refuses: tuple[bytes, ...] = ()
    silent: bool = False
    asked: list[tuple[bytes, dict[str, Any]]] = field(default_factory=list)
    worker_id: str = "w"

    async def decode(self, call: BackendCall, handoff: Handoff | None) -> UpstreamResponse:
        assert handoff is None
        body = json.loads(call.body)
        self.asked.append((call.path, body))
        if call.path in self.refuses:
            return Reply(400, self._refusal())
        return Reply(200, self._stream(body))

    async def _refusal(self) -> AsyncGenerator[bytes, None]:
        yield b'{"error":{"message":"no chat template"}}'

    async def _stream(self, body: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        text = body["messages"][0]["content"] if "messages" in body else body["prompt"]
        tokens = len(text.split()) + TEMPLATE_TOKENS
        self.clock.now_s += self.fixed_s + tokens / self.prefill_tok_s + self.loading_s
        self.loading_s = 0.0
        count = 0 if self.silent else body["max_tokens"]
        events = [b'data: {"choices":[{"text":"a"}]}\n\n'] * count
        if self.one_piece:
            events = [b"".join(events)]
        for number, event in enumerate(events):
            self.clock.now_s += 1 / self.decode_tok_s if number else 0.0
            yield event
        if self.usage:
            counts = {"prompt_tokens": tokens, "completion_tokens": count}
            yield b"data: " + json.dumps({"choices": [], "usage": counts}).encode() + b"\n\n"

    async def probe(self) -> WorkerSnapshot:
        raise AssertionError

    async def load(self, known: WorkerSnapshot) -> WorkerSnapshot:
        raise AssertionError

    def prefill(self, call: BackendCall) -> AsyncGenerator[Handoff | PrefillDone, None]:
        raise AssertionError

    async def release(self, handoff: Handoff, *, consumed: bool) -> None:
        raise AssertionError

    def recomputed(self, handoff: Handoff, counts: TokenCounts) -> int | None:
        raise AssertionError

    def failure_of(self, status: int, body: bytes) -> Failure | None:
        raise AssertionError


class Reply:
    """An answer made as it is read."""

    def __init__(self, status: int, pieces: AsyncGenerator[bytes, None]) -> None:
        self.status = status
        self.headers: Headers = [(b"content-type", b"text/event-stream")]
        self._pieces = pieces
        self.at_end = False

    def __aiter__(self) -> Reply:
        return self

    async def __anext__(self) -> bytes:
        return await anext(self._pieces)

    async def read(self, limit_bytes: int) -> bytes:
        return b"".join([piece async for piece in self])

    def close(self) -> None:
        pass

    def on_close(self, callback: object) -> None:
        raise AssertionError

    async def __aenter__(self) -> Reply:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._pieces.aclose()


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("router.backends.speed_probe.perf_counter", lambda: clock.now_s)
    return clock


async def test_rates_and_the_fixed_cost_come_out(clock: Clock) -> None:
    speeds = await measure(Timed(clock), "m")
    assert speeds.prefill_tok_s == pytest.approx(1000)
    assert speeds.decode_tok_s == pytest.approx(50)
    assert speeds.round_trip_s == pytest.approx(0.03)


async def test_what_is_sent(clock: Clock) -> None:
    worker = Timed(clock)
    await measure(worker, "m")
    await measure(worker, "m")
    bodies = [body for _, body in worker.asked]
    assert [body["max_tokens"] for body in bodies] == [1, 1, OUTPUT_TOKENS] * 2
    assert {body["model"] for body in bodies} == {"m"}
    texts = [body["messages"][0]["content"] for body in bodies]
    assert len({text.split()[0] for text in texts}) == 6  # no prompt begins like another
    assert [len(text.split()) > LONG_WORDS for text in texts] == [False, True, False] * 2


async def test_a_server_that_counts_no_tokens(clock: Clock) -> None:
    speeds = await measure(Timed(clock, usage=False), "m")
    assert speeds.prefill_tok_s == pytest.approx(1000)
    assert speeds.decode_tok_s == pytest.approx(50, rel=0.4)


async def test_a_server_that_sends_all_at_once_tells_no_decode_speed(clock: Clock) -> None:
    speeds = await measure(Timed(clock, one_piece=True), "m")
    assert speeds.decode_tok_s == 0
    assert speeds.prefill_tok_s == pytest.approx(1000)


async def test_a_prompt_that_costs_nothing_gives_a_bound(clock: Clock) -> None:
    speeds = await measure(Timed(clock, prefill_tok_s=1e12, fixed_s=0.5), "m")
    assert speeds.prefill_tok_s >= LONG_WORDS / 0.5
    assert 0 <= speeds.round_trip_s <= 0.5 + 1e-9


async def test_a_model_without_a_chat_template(clock: Clock) -> None:
    worker = Timed(clock, refuses=(b"/v1/chat/completions",))
    assert (await measure(worker, "m")).prefill_tok_s == pytest.approx(1000)
    assert [path for path, _ in worker.asked] == [
        b"/v1/chat/completions",
        *[b"/v1/completions"] * 3,
    ]


async def test_a_server_that_refuses(clock: Clock) -> None:
    worker = Timed(clock, refuses=(b"/v1/chat/completions", b"/v1/completions"))
    with pytest.raises(CannotMeasure, match="HTTP 400: no chat template"):
        await measure(worker, "m")


async def test_a_server_that_says_nothing(clock: Clock) -> None:
    with pytest.raises(CannotMeasure, match="no token in its stream"):
        await asyncio.wait_for(measure(Timed(clock, silent=True), "m"), 5)
