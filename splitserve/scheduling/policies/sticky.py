"""llm-d's prefix affinity: stay with a worker that has the prompt until it is clearly too slow."""

from __future__ import annotations

from collections.abc import Sequence

from splitserve.messages import Candidate, GenerateRequest
from splitserve.scheduling.desk import Desk
from splitserve.scheduling.policies.immediate import ImmediatePolicy
from splitserve.scheduling.policies.shortlist import hit_share, ids, in_flight, whole_first


class Sticky(ImmediatePolicy):
    """Workers with 80 % of the prompt, unless the best other one answers 18 s sooner.

    Among those left: fewest pending prefill tokens, then fewest requests. The times are the
    router's own predictions, where llm-d divides tokens by a fixed rate.
    """

    def __init__(self, hit_share: float = 0.8, patience_s: float = 18.0) -> None:
        self._hit_share, self._patience_s = hit_share, patience_s

    def choose(
        self, request: GenerateRequest, candidates: Sequence[Candidate], desk: Desk
    ) -> Candidate | None:
        """Return the least loaded of the candidates that are kept."""
        known = whole_first(candidates)
        kept = [c for c in known if hit_share(desk, c, request) >= self._hit_share]
        others = [c for c in known if c not in kept]
        if kept and others:
            lost_s = _soonest_s(kept) - _soonest_s(others)
            kept = known if lost_s > self._patience_s else kept

        def load(candidate: Candidate) -> tuple[int, int, str, str]:
            prefill = desk.ledger.workers[candidate.prefill_worker]
            return prefill.pending_prefill_tokens, in_flight(desk, candidate), *ids(candidate)

        return min(kept or known, key=load)


def _soonest_s(candidates: list[Candidate]) -> float:
    return min(c.predicted_ttft_s for c in candidates)
