"""A fixed threshold between serving whole and splitting: remote from so many uncached tokens on."""

from __future__ import annotations

import math
from collections.abc import Sequence

from splitserve.messages import Candidate, GenerateRequest
from splitserve.scheduling.desk import Desk
from splitserve.scheduling.policies.immediate import ImmediatePolicy
from splitserve.scheduling.policies.shortlist import ids, lmetric, split, uncached, whole


class StaticPD(ImmediatePolicy):
    """Split when at least `threshold_tokens` are uncached where the request would run whole.

    0 always splits, infinity never does, each as far as the fleet allows. Whole plans are chosen
    by LMetric. Split ones: fewest pending prefill tokens, then fewest prompt tokens held.
    """

    def __init__(self, threshold_tokens: float = 0) -> None:
        self.threshold_tokens = threshold_tokens

    @classmethod
    def never(cls) -> StaticPD:
        """Serve whole wherever a worker may."""
        return cls(math.inf)

    def choose(
        self, request: GenerateRequest, candidates: Sequence[Candidate], desk: Desk
    ) -> Candidate | None:
        """Return the best plan on the threshold's side, or the other side's where it has none."""
        local, pairs = whole(candidates), split(candidates)
        best = min(local, key=lambda c: (lmetric(desk, c, request), *ids(c)), default=None)
        short = best and uncached(desk, best, request) < self.threshold_tokens
        if best is not None and (short or not pairs):
            return best
        return min(pairs, key=lambda c: (*_pool_loads(desk, c), *ids(c)))


def _pool_loads(desk: Desk, candidate: Candidate) -> tuple[int, int]:
    workers = desk.ledger.workers
    pending_tokens = workers[candidate.prefill_worker].pending_prefill_tokens
    return pending_tokens, workers[candidate.decode_worker].kv_soon_tokens
