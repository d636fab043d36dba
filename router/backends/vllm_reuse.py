"""Did vLLM's decode worker use the KV it was promised, or compute the prompts again?

Its answers do not tell, but its counters do: over any time, what came from other workers and from
its own cache must be at least what hand-offs promised. Requests that were not handed over can only
add to that, so a shortfall is certain, and a small one may stay hidden behind them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Look:
    """What was promised, and how many hand-offs had begun, when counters were asked for."""

    promised_tokens: int
    begun: int
    idle: bool


class ReuseCheck:
    """The promises to one decode worker since it was last seen without a hand-off in flight."""

    def __init__(self) -> None:
        self._promised_tokens = 0
        self._begun = 0
        self._in_flight = 0
        self._counted_tokens: float | None = None
        self._was_short = False

    def begin(self) -> None:
        """A hand-off was sent to it."""
        self._begun += 1
        self._in_flight += 1

    def end(self) -> None:
        """That one is over, however it ended."""
        self._in_flight -= 1

    def promise(self, tokens: int) -> None:
        """One ended well that should have saved it these prompt tokens."""
        self._promised_tokens += tokens

    def look(self) -> Look:
        """Call this before its counters are asked for."""
        return Look(self._promised_tokens, self._begun, self._in_flight == 0)

    def settle(self, look: Look, counted_tokens: float) -> int:
        """Take in `counted_tokens`, its prompt tokens so far that it did not have to compute.

        Returns how many promised ones it computed again. An engine answers a little before it
        counts, so what is missing is believed when it is missing twice.
        """
        if not look.idle or look.begun != self._begun:
            return 0
        if self._counted_tokens is None:
            self._begin_anew(counted_tokens)
            return 0
        short = int(look.promised_tokens - (counted_tokens - self._counted_tokens))
        if short > 0 and not self._was_short:
            self._was_short = True
            return 0
        self._begin_anew(counted_tokens)
        return max(0, short)

    def _begin_anew(self, counted_tokens: float) -> None:
        self._counted_tokens = counted_tokens
        self._promised_tokens = 0
        self._was_short = False
