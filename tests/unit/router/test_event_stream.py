"""Where events end, which is the first with a token, and the counts at the end."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.event_stream import EventCutter, bears_token, is_event_stream
from router.usage import TokenCounts, UsageMeter

STREAM = b'data: {"a":1}\n\n: ping\n\ndata: x\r\ndata: y\r\n\r\ndata: [DONE]\n\n'


def cut(pieces: list[bytes]) -> tuple[list[bytes], bytes]:
    cutter = EventCutter()
    return [whole for piece in pieces if (whole := cutter.whole(piece))], cutter.rest()


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_any_cut_gives_whole_events_and_all_bytes(at: list[int]) -> None:
    marks = sorted({0, *at, len(STREAM)})
    pieces = [STREAM[a:b] for a, b in itertools.pairwise(marks)]
    passed, rest = cut(pieces)
    assert rest == b""
    assert b"".join(passed) == STREAM
    assert all(piece.endswith((b"\n\n", b"\r\n\r\n")) for piece in passed)


def test_what_is_half_waits_and_is_there_at_a_good_end() -> None:
    assert cut([b"data: 1\n\nda", b"ta: 2"]) == ([b"data: 1\n\n"], b"data: 2")


def test_an_endless_event_is_not_held_for_ever() -> None:
    piece = b"x" * 100_000
    passed, rest = cut([piece] * 10)
    assert len(rest) <= 256 * 1024
    assert b"".join(passed) + rest == piece * 10


@pytest.mark.parametrize(
    "value,expected",
    [
        (b"text/event-stream", True),
        (b"Text/Event-Stream; charset=utf-8", True),
        (b"application/json", False),
    ],
)
def test_event_stream_by_its_type(value: bytes, expected: bool) -> None:
    assert is_event_stream([(b"x", b"y"), (b"content-type", value)]) is expected


def chunk(**choice: object) -> bytes:
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


@pytest.mark.parametrize(
    "event",
    [
        b": comment\n\n",
        b"event: x\nid: 1\n\n",
        b'data: {"choices":[]}\n\n',
        chunk(delta={"role": "assistant"}),
        chunk(delta={"role": "assistant", "content": ""}, finish_reason=None, logprobs=None),
        chunk(delta={"role": "assistant", "content": None, "tool_calls": []}),
        chunk(text=""),
        chunk(),
    ],
)
def test_no_token_yet(event: bytes) -> None:
    assert not bears_token(event)
    assert bears_token(event + chunk(delta={"content": "a"}))


@pytest.mark.parametrize(
    "event",
    [
        chunk(delta={"content": "a"}),
        chunk(delta={"content": "data: "}),
        chunk(delta={"reasoning_content": "a"}),
        chunk(delta={"tool_calls": [{"index": 0}]}),
        chunk(delta={}, finish_reason="stop"),
        chunk(text="a"),
        b"data: [DONE]\n\n",
        b'data: {"type":"response.created"}\n\n',
        b"data: no json\r\n\r\n",
    ],
)
def test_token(event: bytes) -> None:
    assert bears_token(event)


USAGE = {"prompt_tokens": 5, "completion_tokens": 3}
DONE = b"data: [DONE]\n\n"


def metered(*pieces: bytes, stream: bool = True) -> TokenCounts:
    meter = UsageMeter(stream=stream)
    for piece in pieces:
        meter.see(piece)
    return meter.counts()


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_usage_of_a_stream_however_it_is_spaced(separators: tuple[str, str]) -> None:
    event = json.dumps({"choices": [], "usage": USAGE}, separators=separators).encode()
    assert metered(b"data: " + event + b"\n\n", DONE) == TokenCounts(5, None, 3, exact=True)
    assert metered(b"data:" + event + b"\r\n\r\n" + DONE) == TokenCounts(5, None, 3, exact=True)


def test_the_last_usage_counts_and_null_does_not() -> None:
    first = b'data: {"usage": {"prompt_tokens": 5, "completion_tokens": 1}}\n\n'
    last = b'data: {"usage": {"prompt_tokens": 5, "completion_tokens": 2}}\n\n'
    null = b'data: {"usage": null}\n\n'
    assert metered(first, last, null, DONE).output_tokens == 2


def test_usage_in_the_text_is_no_usage() -> None:
    text = json.dumps({"choices": [{"delta": {"content": '"usage":{"completion_tokens":9}'}}]})
    counts = metered(b"data: " + text.encode() + b"\n\n", DONE)
    assert not counts.exact


def test_without_usage_chunks_are_counted() -> None:
    assert metered(*[b"data: {}\n\n"] * 6, DONE) == TokenCounts(None, None, 5, exact=False)
    assert metered() == TokenCounts(None, None, 0, exact=False)


def test_cached_tokens_and_embeddings() -> None:
    details = {"prompt_tokens_details": {"cached_tokens": 2}}
    body = json.dumps({"usage": {"prompt_tokens": 5, "completion_tokens": 1, **details}}).encode()
    assert metered(body[:9], body[9:], stream=False) == TokenCounts(5, 2, 1, exact=True)
    body = json.dumps({"usage": {"prompt_tokens": 5, "total_tokens": 5}}).encode()
    assert metered(body, stream=False) == TokenCounts(5, None, 0, exact=True)


@pytest.mark.parametrize("body", [b"", b"[]", b"no json", b'{"usage": 5}', b"x" * (3 << 20)])
def test_answers_that_tell_nothing(body: bytes) -> None:
    assert metered(body, stream=False) == TokenCounts(None, None, 0, exact=False)


def test_memory_of_a_long_stream_is_bounded() -> None:
    meter = UsageMeter(stream=True)
    for _ in range(10_000):
        meter.see(b"data: {}\n\n")
    assert sum(map(len, meter._kept)) < 20_000
