"""How fast a worker is that does not tell: a few short requests to it, before it gets traffic.

The first one is not counted: a server may have to load the model. A long prompt and a short one,
each answered by one token, give prefill speed by their difference and the fixed cost of a request
by what is left; the tokens of the last answer give decode speed.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from time import perf_counter

from router.backends.base import Backend, BackendCall, quoted_error
from router.event_stream import EventCutter, bears_token
from router.usage import UsageMeter

CHAT, COMPLETIONS = b"/v1/chat/completions", b"/v1/completions"
LONG_WORDS, SHORT_WORDS = 256, 4  # a common word is about a token
OUTPUT_TOKENS = 8
_LEAST_S = 1e-4  # what comes closer together came in one piece, and tells no speed
_ERROR_LIMIT_BYTES = 64 * 1024
_END = b"data: [DONE]"


@dataclass(frozen=True, slots=True)
class Speeds:
    """What was measured; 0 for a rate that the answers did not show.

    `round_trip_s` is what a request costs beside its tokens: the way there and back, and the
    server's own handling.
    """

    prefill_tok_s: float
    decode_tok_s: float
    round_trip_s: float


class CannotMeasure(ValueError):
    """The worker did not answer as a generating server does. Says what it said."""


@dataclass(frozen=True, slots=True)
class _Timing:
    """One answer: seconds from its request on."""

    first_s: float
    last_s: float
    prompt_tokens: int
    output_tokens: int


async def measure(backend: Backend, model: str) -> Speeds:
    """Measure a worker that is otherwise idle. Raises UpstreamError and CannotMeasure."""
    probe = _Probe(backend, model)
    path = await _warm_up(probe)
    long = await probe.time(path, LONG_WORDS, 1)
    short = await probe.time(path, SHORT_WORDS, OUTPUT_TOKENS)
    return _speeds(long, short)


async def _warm_up(probe: _Probe) -> bytes:
    """Return the route that works: chat, or text completions for a model without a template."""
    try:
        await probe.time(CHAT, SHORT_WORDS, 1)
    except CannotMeasure:
        await probe.time(COMPLETIONS, SHORT_WORDS, 1)
        return COMPLETIONS
    return CHAT


def _speeds(long: _Timing, short: _Timing) -> Speeds:
    fresh = long.prompt_tokens - short.prompt_tokens
    longer_s = long.first_s - short.first_s
    if fresh > 0 and longer_s > 0:
        prefill_tok_s = fresh / longer_s
        round_trip_s = max(0.0, short.first_s - short.prompt_tokens / prefill_tok_s)
    else:  # the short one was no faster: all that is known is a bound
        prefill_tok_s = long.prompt_tokens / max(long.first_s, _LEAST_S)
        round_trip_s = short.first_s
    gap_s = short.last_s - short.first_s
    told = short.output_tokens > 1 and gap_s > _LEAST_S
    decode_tok_s = (short.output_tokens - 1) / gap_s if told else 0.0
    return Speeds(prefill_tok_s, decode_tok_s, round_trip_s)


@dataclass(frozen=True, slots=True)
class _Probe:
    """Sends one request after another to a worker."""

    backend: Backend
    model: str

    async def time(self, path: bytes, words: int, most_tokens: int) -> _Timing:
        """Ask for at most `most_tokens` after a prompt of `words`."""
        call = self._call(path, _body(path, self.model, words, most_tokens))
        first_s: float | None = None
        last_s = 0.0
        sent_s = perf_counter()  # the loop's own clock counts milliseconds
        meter, cutter = UsageMeter(stream=True), EventCutter()
        async with await self.backend.decode(call, None) as response:
            if response.status != 200:
                body = await response.read(_ERROR_LIMIT_BYTES)
                raise CannotMeasure(f"HTTP {response.status}{quoted_error(body)}")
            async for piece in response:
                whole = cutter.whole(piece)
                meter.see(whole)
                if bears_token(whole.replace(_END, b"")):
                    last_s = perf_counter() - sent_s
                    first_s = last_s if first_s is None else first_s
        if first_s is None:
            raise CannotMeasure("HTTP 200 and no token in its stream")
        counts = meter.counts()
        return _Timing(first_s, last_s, counts.prompt_tokens or words, counts.output_tokens)

    @staticmethod
    def _call(path: bytes, body: bytes) -> BackendCall:
        request_id = f"speed-probe-{secrets.token_hex(6)}"
        own_id = (b"x-request-id", request_id.encode())
        headers = ((b"content-type", b"application/json"), own_id)
        return BackendCall(path, body, headers, request_id)


def _body(path: bytes, model: str, words: int, most_tokens: int) -> bytes:
    """A prompt that no cache has seen."""
    text = " ".join([secrets.token_hex(4), *["river"] * words])
    prompt = {"prompt": text} if path == COMPLETIONS else {"messages": [_message(text)]}
    rest = {
        "max_tokens": most_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps({"model": model, **prompt, **rest}).encode()


def _message(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
