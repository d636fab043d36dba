"""An error that comes as a stream's first event is as good as a status."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import pytest

from router.backends.first_event import error_in, opened
from router.errors import ClosedEarly
from router.wire import Headers

EVENTS: Headers = [(b"content-type", b"text/event-stream"), (b"x-a", b"1")]
JSON: Headers = [(b"content-type", b"application/json")]
TOKEN = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
BROKEN = b'data: {"error":{"message":"KVTransferError","code":500}}\n\n'


class Answer:
    """An answer in pieces; an exception among them breaks it."""

    def __init__(
        self, *pieces: bytes | Exception, status: int = 200, headers: Headers = EVENTS
    ) -> None:
        self.status = status
        self.headers = headers
        self.left = list(pieces)
        self.taken = 0
        self.closed = 0
        self.callbacks: list[Callable[[], None]] = []

    @property
    def at_end(self) -> bool:
        return not self.left

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        if not self.left:
            raise StopAsyncIteration
        self.taken += 1
        piece = self.left.pop(0)
        if isinstance(piece, Exception):
            raise piece
        return piece

    async def read(self, limit_bytes: int) -> bytes:
        return b"".join([piece async for piece in self])

    def close(self) -> None:
        self.closed += 1

    def on_close(self, callback: Callable[[], None]) -> None:
        self.callbacks.append(callback)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()


async def test_a_good_stream_comes_whole() -> None:
    answer = Answer(b": ping\n\n", TOKEN[:9], TOKEN[9:] + TOKEN, b"data: [DONE]\n\n")
    stream = await opened(answer)
    assert (stream.status, stream.headers) == (200, EVENTS)
    assert answer.taken == 1  # a comment is an event: nobody waits longer than for that
    assert not stream.at_end
    assert b"".join([piece async for piece in stream]) == (
        b": ping\n\n" + TOKEN + TOKEN + b"data: [DONE]\n\n"
    )
    assert stream.at_end


async def test_bytes_held_are_counted_as_left() -> None:
    stream = await opened(Answer(TOKEN))
    assert not stream.at_end
    assert await anext(stream) == TOKEN
    assert stream.at_end


async def test_an_error_becomes_the_answer() -> None:
    answer = Answer(BROKEN[:20], BROKEN[20:], b"data: [DONE]\n\n")
    stream = await opened(answer)
    assert stream.status == 500
    assert stream.headers == ((b"content-type", b"application/json"),)
    assert await stream.read(1 << 20) == BROKEN[6:].strip()


@pytest.mark.parametrize(
    "answer", [Answer(BROKEN, headers=JSON), Answer(BROKEN, status=500)], ids=["json", "status"]
)
async def test_other_answers_are_left_alone(answer: Answer) -> None:
    assert await opened(answer) is answer
    assert answer.taken == 0


async def test_an_error_after_a_token_is_the_clients_to_see() -> None:
    stream = await opened(Answer(TOKEN, BROKEN))
    assert stream.status == 200
    assert await stream.read(1 << 20) == TOKEN + BROKEN


@pytest.mark.parametrize("pieces", [(), (b"data: {",)], ids=["empty", "cut inside an event"])
async def test_a_stream_without_an_event(pieces: tuple[bytes, ...]) -> None:
    stream = await opened(Answer(*pieces))
    assert stream.status == 200
    assert await stream.read(1 << 20) == b"".join(pieces)


async def test_a_stream_that_breaks_is_closed() -> None:
    answer = Answer(b"data", ClosedEarly("http://w", 4, "reset"))
    with pytest.raises(ClosedEarly):
        await opened(answer)
    assert answer.closed == 1


async def test_closing_reaches_the_answer_itself() -> None:
    answer = Answer(TOKEN)
    async with await opened(answer) as stream:
        stream.on_close(lambda: None)
    assert answer.closed == 1
    assert len(answer.callbacks) == 1


@pytest.mark.parametrize(
    "events, status",
    [
        (BROKEN, 500),
        (b'data:{"error":{"message":"m","code":429}}\n\n', 429),
        (b'data: {"error":{"message":"m","code":"rate_limited"}}\n\n', 500),
        (b'data: {"error":{"code":200}}\r\n\r\n', 500),
        (b": ping\n" + BROKEN, 500),
        (TOKEN + BROKEN, None),
        (b'data: {"error":null}\n\n', None),
        (b"data: [DONE]\n\n", None),
        (b": ping\n\n", None),
        (b"", None),
    ],
)
def test_errors_in_events(events: bytes, status: int | None) -> None:
    found = error_in(events)
    assert (found[0] if found is not None else None) == status
