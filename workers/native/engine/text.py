"""From token ids to text that may be sent: whole characters, and nothing of a stop string."""

from __future__ import annotations

from typing import Protocol


class Detokenizer(Protocol):
    """Turns ids into text as they come; see workers.native.models.tokenizer."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class TextStream:
    """One answer's text. Holds back what may become a stop string, cuts at the first one."""

    def __init__(self, detokenizer: Detokenizer, stops: tuple[str, ...]) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._held = ""
        self.stopped = False

    def feed(self, token_id: int) -> str:
        """Take a token; return the text that is now safe to send, maybe ""."""
        return self._release(self._detokenizer.push(token_id))

    def finish(self) -> str:
        """No more tokens come: return all that was held back, unless a stop string cut it."""
        if self.stopped:
            return ""
        text = self._release(self._detokenizer.flush())
        rest, self._held = self._held, ""  # a stop string leaves nothing held
        return text + rest

    def _release(self, more: str) -> str:
        if not self._stops:
            return more
        self._held += more
        found = [(self._held.find(stop), len(stop)) for stop in self._stops]
        hits = [(at + length, at) for at, length in found if at >= 0]
        if hits:
            # The one that is complete first, however the text was cut into tokens.
            self.stopped = True
            text, self._held = self._held[: min(hits)[1]], ""
            return text
        keep = max(self._overlap(stop) for stop in self._stops)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that is a beginning of `stop`."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)
