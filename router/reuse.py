"""Hand-offs that were for nothing: the decode worker computed the prompt again all the same.

Engines do that without an error, so a pair can be slower than no split at all and look well.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass

from router.dispatch import Dispatcher
from splitserve import messages as m

log = logging.getLogger("splitserve.reuse")

IN_A_ROW = 3  # one may be an eviction under load
HOLD_S = 300.0
_ROW_S = 120.0  # what counters show is a row only where it is not longer apart
_LOG_EVERY_S = 60.0
_PAIRS = 1024
Pair = tuple[str, str]  # prefill worker, decode worker


@dataclass(slots=True)
class _Streak:
    """How often in a row hand-offs of a pair were computed again, and how many tokens that were."""

    times: int = 0
    tokens: int = 0
    last_s: float = 0.0
    unlogged: int = 0
    logged_s: float = float("-inf")


class ReuseWatch:
    """Counts them per pair; after several in a row the pair gets no more for some minutes."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._streaks: OrderedDict[Pair, _Streak] = OrderedDict()
        self._untold: OrderedDict[Pair, None] = OrderedDict()

    def saw(self, prefill: str, decode: str, recomputed_tokens: int | None) -> None:
        """A hand-off is over. `recomputed_tokens` None: its answer does not tell."""
        pair = prefill, decode
        if recomputed_tokens is None:
            self._untold[pair] = None
            if len(self._untold) > _PAIRS:
                self._untold.popitem(last=False)
        elif recomputed_tokens:
            self._again(pair, recomputed_tokens)
        elif (streak := self._streaks.get(pair)) is not None:
            streak.times = streak.tokens = 0

    def saw_counters(self, decode: str, recomputed_tokens: int) -> None:
        """A worker's counters show what its answers did not tell: it is on all pairs that used it
        since they were looked at.
        """
        for pair in [pair for pair in self._untold if pair[1] == decode]:
            del self._untold[pair]
            streak = self._streaks.get(pair)
            if streak is not None and self._dispatcher.clock() - streak.last_s > _ROW_S:
                streak.times = streak.tokens = 0
            self._again(pair, recomputed_tokens)

    def __len__(self) -> int:
        return len(self._streaks)

    def _again(self, pair: Pair, tokens: int) -> None:
        streak = self._streaks.get(pair)
        if streak is None:
            streak = self._streaks[pair] = _Streak()
            if len(self._streaks) > _PAIRS:
                self._streaks.popitem(last=False)
        streak.times += 1
        streak.tokens += tokens
        streak.last_s = self._dispatcher.clock()
        self._log(pair, streak, tokens)
        if streak.times >= IN_A_ROW:
            self._quarantine(pair, streak)

    def _log(self, pair: Pair, streak: _Streak, tokens: int) -> None:
        now_s = self._dispatcher.clock()
        streak.unlogged += 1
        if now_s - streak.logged_s < _LOG_EVERY_S:
            return
        log.warning(
            "%s -> %s: %d prompt tokens were handed over and computed again (times since the "
            "last line: %d)",
            *pair, tokens, streak.unlogged,
        )  # fmt: skip
        streak.logged_s, streak.unlogged = now_s, 0

    def _quarantine(self, pair: Pair, streak: _Streak) -> None:
        prefill, decode = pair
        reason = (
            f"hand-offs were computed again on {decode} {streak.times} times in a row "
            f"({streak.tokens} prompt tokens)"
        )
        log.warning("%s -> %s: no hand-offs for %g s: %s", *pair, HOLD_S, reason)
        streak.times = streak.tokens = 0
        until_s = self._dispatcher.clock() + HOLD_S
        self._dispatcher.tell(m.PairJudged(prefill, decode, reason, until_s))
