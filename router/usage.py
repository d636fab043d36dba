"""Token counts out of an answer that is relayed as bytes.

Only the end of a stream is looked at: OpenAI servers send usage in the last chunk, or not at all.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import msgspec

_TAIL_BYTES = 8 * 1024
_WHOLE_BYTES = 1 << 20
_LAST_EVENTS = 4  # usage, [DONE], and what an engine may put around them


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Timings(msgspec.Struct):
    """llama.cpp's account of an answer, in its last chunk whether usage was asked for or not."""

    cache_n: int = 0
    prompt_n: int = 0
    predicted_n: int = 0


class _Answer(msgspec.Struct):
    usage: _Usage | None = None
    timings: msgspec.Raw = msgspec.Raw(b"")

    def counted(self) -> _Usage | None:
        """Return its usage, or what llama.cpp's timings say instead."""
        if self.usage is not None or not bytes(self.timings):
            return self.usage
        try:
            told = msgspec.json.decode(self.timings, type=_Timings)
        except msgspec.DecodeError:  # another engine's word for something else
            return None
        prompt_tokens = told.cache_n + told.prompt_n
        return _Usage(prompt_tokens, told.predicted_n, _Details(told.cache_n))


_ANSWER = msgspec.json.Decoder(_Answer)


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """What an engine said of one answer; `exact` False: output tokens were counted by chunk."""

    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int
    exact: bool


class UsageMeter:
    """Sees every relayed piece; keeps a bounded end of them."""

    __slots__ = ("_bytes", "_events", "_kept", "_kept_bytes", "_stream")

    def __init__(self, *, stream: bool) -> None:
        self._stream = stream
        self._kept: deque[bytes] = deque()
        self._kept_bytes = 0
        self._events = 0
        self._bytes = 0

    def see(self, piece: bytes) -> None:
        """Take note of a relayed piece; of a stream, whole events."""
        self._bytes += len(piece)
        if self._stream:
            self._events += piece.count(b"\n\n")
            self._kept.append(piece)
            self._kept_bytes += len(piece)
            while self._kept_bytes - len(self._kept[0]) > _TAIL_BYTES:
                self._kept_bytes -= len(self._kept.popleft())
        elif self._bytes <= _WHOLE_BYTES:
            self._kept.append(piece)

    @property
    def events(self) -> int:
        """Server-sent events so far: about one a token."""
        return self._events

    def counts(self) -> TokenCounts:
        """Return what was found."""
        text = b"".join(self._kept)
        usage = self._from_stream(text) if self._stream else self._parse(text)
        if usage is None:
            return TokenCounts(None, None, max(0, self._events - 2), exact=False)
        details = usage.prompt_tokens_details
        cached_tokens = details.cached_tokens if details else None
        # Embeddings and the like have no completion tokens: they generate none.
        return TokenCounts(
            usage.prompt_tokens, cached_tokens, usage.completion_tokens or 0, exact=True
        )

    def _from_stream(self, text: bytes) -> _Usage | None:
        for event in reversed((b"\n" + text).rsplit(b"\ndata:", _LAST_EVENTS)[1:]):
            line = event.partition(b"\n")[0]
            told = b'"usage"' in line or b'"timings"' in line
            usage = self._parse(line) if told else None
            if usage is not None:
                return usage
        return None

    @staticmethod
    def _parse(text: bytes) -> _Usage | None:
        try:
            return _ANSWER.decode(text).counted()
        except msgspec.DecodeError:
            return None
