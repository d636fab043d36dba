"""LMetric (OSDI 2026): prompt tokens to be computed, times the batch that would run beside them."""

from __future__ import annotations

from collections.abc import Sequence

from splitserve.messages import Candidate, GenerateRequest
from splitserve.scheduling.desk import Desk
from splitserve.scheduling.policies.immediate import ImmediatePolicy
from splitserve.scheduling.policies.shortlist import ids, lmetric, whole_first


class LMetric(ImmediatePolicy):
    """Lowest (pending prefill tokens + uncached tokens) * (requests in flight + 1).

    A split plan takes the first factor from its prefill worker, the second from its decode worker.
    """

    def choose(
        self, request: GenerateRequest, candidates: Sequence[Candidate], desk: Desk
    ) -> Candidate | None:
        """Return the candidate with the lowest product."""
        return min(whole_first(candidates), key=lambda c: (lmetric(desk, c, request), *ids(c)))
