"""Least predicted work: the plan that gives a first token, and ten more, soonest."""

from __future__ import annotations

from collections.abc import Sequence

from splitserve.messages import Candidate, GenerateRequest
from splitserve.scheduling.desk import Desk
from splitserve.scheduling.policies.immediate import ImmediatePolicy

_TOKENS_AHEAD = 10  # how many steps of decode speed count against one first token


class LeastWork(ImmediatePolicy):
    """Lowest predicted TTFT plus ten decode steps; ties to fewest requests in flight, then id."""

    def choose(
        self, request: GenerateRequest, candidates: Sequence[Candidate], desk: Desk
    ) -> Candidate | None:
        """Return the cheapest candidate."""

        def cost(candidate: Candidate) -> tuple[float, int, str, str]:
            return (
                candidate.predicted_ttft_s + _TOKENS_AHEAD * candidate.predicted_tpot_s,
                desk.ledger.workers[candidate.decode_worker].in_flight,
                candidate.prefill_worker,
                candidate.decode_worker,
            )

        return min(candidates, key=cost)
