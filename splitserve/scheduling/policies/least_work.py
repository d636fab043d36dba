"""Least predicted work: the plan that gives a first token, and ten more, soonest."""

from __future__ import annotations

from collections.abc import Sequence

from splitserve.messages import Candidate, GenerateRequest
from splitserve.scheduling.ledger import Ledger

_TOKENS_AHEAD = 10  # how many steps of decode speed count against one first token


class LeastWork:
    """Lowest predicted TTFT plus ten decode steps; ties to fewest requests in flight, then id."""

    def choose(
        self, request: GenerateRequest, candidates: Sequence[Candidate], ledger: Ledger
    ) -> Candidate | None:
        """Return the cheapest feasible candidate, or None."""
        feasible = [c for c in candidates if c.feasible]
        return min(feasible, key=lambda c: self._cost(c, ledger)) if feasible else None

    @staticmethod
    def _cost(candidate: Candidate, ledger: Ledger) -> tuple[float, int, str, str]:
        return (
            candidate.predicted_ttft_s + _TOKENS_AHEAD * candidate.predicted_tpot_s,
            ledger.workers[candidate.decode_worker].in_flight,
            candidate.prefill_worker,
            candidate.decode_worker,
        )
