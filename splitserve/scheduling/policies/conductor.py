"""Mooncake's Conductor: the soonest predicted first token, and early refusal where it is late."""

from __future__ import annotations

from collections.abc import Sequence

from splitserve.messages import Candidate, Choice, GenerateRequest, Refusal
from splitserve.scheduling.desk import Desk
from splitserve.scheduling.flight import Flight
from splitserve.scheduling.plans import PlanTable
from splitserve.scheduling.policies.immediate import ImmediatePolicy
from splitserve.scheduling.policies.shortlist import ids, in_flight, whole_first


class Conductor(ImmediatePolicy):
    """Lowest predicted TTFT, then fewest requests; 429 at arrival when none keeps both targets."""

    def arrived(self, flight: Flight, desk: Desk, now_s: float) -> None:
        """Refuse what would be late on every worker that is free for it."""
        slo, waited_s = flight.request.slo, now_s - flight.arrived_s
        plans = PlanTable(desk).candidates(
            flight.request, flight.failed_workers, whole_only=flight.handoff_failed
        )
        feasible = [c for c in plans if c.feasible]
        late = [
            c
            for c in feasible
            if (slo.ttft_s is not None and waited_s + c.predicted_ttft_s > slo.ttft_s)
            or (slo.tpot_s is not None and c.predicted_tpot_s > slo.tpot_s)
        ]
        if feasible and len(late) == len(feasible):
            detail = "no worker is predicted to keep its targets"
            desk.decline(flight, Refusal.HOPELESS, detail, 1.0, Choice(plans))

    def choose(
        self, request: GenerateRequest, candidates: Sequence[Candidate], desk: Desk
    ) -> Candidate | None:
        """Return the candidate whose first token comes soonest."""
        known = whole_first(candidates)
        return min(known, key=lambda c: (c.predicted_ttft_s, in_flight(desk, c), *ids(c)))
