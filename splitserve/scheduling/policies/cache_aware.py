"""Cache-aware routing as SGLang's router and its descendants (SMG, vllm-router) do it."""

from __future__ import annotations

from collections.abc import Sequence

from splitserve.messages import Candidate, GenerateRequest
from splitserve.scheduling.desk import Desk
from splitserve.scheduling.policies.immediate import ImmediatePolicy
from splitserve.scheduling.policies.shortlist import (
    fewest_in_flight,
    hit_share,
    ids,
    in_flight,
    uncached,
    whole_first,
)


class CacheAware(ImmediatePolicy):
    """The best prefix match if it is good enough, else the worker that was sent least.

    Loads further apart than 64 requests and a factor 1.5 send a request to the shortest queue.
    A worker's tree grows by the tokens it was sent and did not have.
    """

    def __init__(
        self, cache_share: float = 0.3, apart_requests: int = 64, apart_ratio: float = 1.5
    ) -> None:
        self._cache_share = cache_share
        self._apart_requests, self._apart_ratio = apart_requests, apart_ratio
        self._tree_tokens: dict[str, int] = {}

    def choose(
        self, request: GenerateRequest, candidates: Sequence[Candidate], desk: Desk
    ) -> Candidate | None:
        """Return the candidate chosen, and count what its worker's tree gains."""
        chosen = self._pick(request, whole_first(candidates), desk)
        trees = {w: t for w, t in self._tree_tokens.items() if w in desk.ledger.workers}
        fresh_tokens = uncached(desk, chosen, request)
        trees[chosen.prefill_worker] = trees.get(chosen.prefill_worker, 0) + fresh_tokens
        self._tree_tokens = trees
        return chosen

    def _pick(self, request: GenerateRequest, known: list[Candidate], desk: Desk) -> Candidate:
        loads = [in_flight(desk, c) for c in known]
        low, high = min(loads), max(loads)
        if high - low > self._apart_requests and high > self._apart_ratio * low:
            return fewest_in_flight(desk, known)
        best = min(known, key=lambda c: (uncached(desk, c, request), in_flight(desk, c), *ids(c)))
        if hit_share(desk, best, request) > self._cache_share:
            return best
        return min(known, key=lambda c: (self._tree_tokens.get(c.prefill_worker, 0), *ids(c)))
