"""How long answers get: quantiles of what was seen, no predictor.

A ring of the last 400 outputs per (tenant, class, limit), falling back to the class, then to 200.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from splitserve.messages import GenerateRequest

_RING = 400
_ENOUGH = 20
_UNKNOWN_OUTPUT_TOKENS = 200
_UNKNOWN_LEFT_TOKENS = 10
_SCALE_WEIGHT = 0.1


@dataclass(slots=True)
class LengthRing:
    """The last outputs of one kind of request, in tokens."""

    _ring: deque[int] = field(default_factory=deque)
    _sorted: list[int] = field(default_factory=list)
    _sum: int = 0

    def see(self, tokens: int) -> None:
        """Take in a finished output."""
        if len(self._ring) >= _RING:
            old = self._ring.popleft()
            del self._sorted[bisect_left(self._sorted, old)]
            self._sum -= old
        self._ring.append(tokens)
        insort(self._sorted, tokens)
        self._sum += tokens

    @property
    def enough(self) -> bool:
        """True when quantiles mean something."""
        return len(self._sorted) >= _ENOUGH

    @property
    def mean(self) -> float:
        """Mean output."""
        return self._sum / len(self._ring) if self._ring else float(_UNKNOWN_OUTPUT_TOKENS)

    def left(self, quantile: float, so_far: int) -> int:
        """Quantile of the tokens still to come after `so_far`; at least 1."""
        if not self.enough:
            return _UNKNOWN_LEFT_TOKENS
        first = bisect_right(self._sorted, so_far)
        longer = len(self._sorted) - first
        if longer <= 0:
            return 1
        return max(1, self._sorted[first + min(longer - 1, int(quantile * longer))] - so_far)


class Lengths:
    """All rings. `oracle` set: the true output length of a request, for upper bounds."""

    def __init__(self, oracle: Callable[[str], int] | None = None) -> None:
        self._rings: dict[tuple[str, str, int], LengthRing] = {}
        self._classes: dict[str, LengthRing] = {}
        self._oracle = oracle

    def see(self, request: GenerateRequest, tokens: int) -> None:
        """Take in a finished request."""
        self._rings.setdefault(_key(request), LengthRing()).see(tokens)
        self._classes.setdefault(request.service_class, LengthRing()).see(tokens)

    def left(self, request: GenerateRequest, quantile: float, so_far: int) -> int:
        """Quantile of the remaining tokens of `request`, never over its own limit."""
        if self._oracle is not None:
            return max(1, self._oracle(request.request_id) - so_far)
        left = self._ring(request).left(quantile, so_far)
        limit = request.max_tokens
        return left if limit is None else max(1, min(left, limit - so_far))

    def mean(self, request: GenerateRequest) -> float:
        """Expected output of `request`."""
        if self._oracle is not None:
            return float(self._oracle(request.request_id))
        mean = self._ring(request).mean
        return mean if request.max_tokens is None else min(mean, float(request.max_tokens))

    def _ring(self, request: GenerateRequest) -> LengthRing:
        ring = self._rings.get(_key(request))
        if ring is not None and ring.enough:
            return ring
        return self._classes.get(request.service_class) or ring or LengthRing()


def _key(request: GenerateRequest) -> tuple[str, str, int]:
    limit = request.max_tokens
    return (request.tenant, request.service_class, 0 if limit is None else limit.bit_length())


class PromptScale:
    """True prompt tokens over the edge's guess, per model; languages and templates differ."""

    def __init__(self) -> None:
        self._scales: dict[str, float] = {}

    def apply(self, model: str, guess: int) -> int:
        """Return the better guess."""
        return max(1, round(guess * self._scales.get(model, 1.0)))

    def see(self, model: str, guess: int, true_tokens: int) -> None:
        """Learn from an answer that told its prompt's tokens; `guess` is the one scaled before."""
        if guess <= 0 or true_tokens <= 0:
            return
        known = self._scales.get(model, 1.0)
        seen = min(8.0, max(0.125, known * true_tokens / guess))
        self._scales[model] = known + _SCALE_WEIGHT * (seen - known)
