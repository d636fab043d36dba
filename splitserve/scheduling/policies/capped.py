"""A static cap on every worker, and a queue in which batch stands behind everything else."""

from __future__ import annotations

from collections.abc import Sequence

from splitserve.messages import Candidate, GenerateRequest
from splitserve.scheduling.desk import Desk
from splitserve.scheduling.flight import Flight
from splitserve.scheduling.policies.immediate import ImmediatePolicy
from splitserve.scheduling.policies.shortlist import fewest_in_flight, whole_first


class Capped(ImmediatePolicy):
    """At most `cap` requests on a worker, interactive ones first, each to the fewest in flight."""

    def __init__(self, cap: int = 16) -> None:
        self.cap = cap

    def order(self, desk: Desk, now_s: float) -> list[Flight]:
        """Interactive before batch, each in order of arrival."""
        return sorted(desk.waiting.values(), key=lambda f: (f.batch, f.arrived_s))

    def choose(
        self, request: GenerateRequest, candidates: Sequence[Candidate], desk: Desk
    ) -> Candidate | None:
        """Return the least busy candidate under the cap, or None to wait."""
        workers = desk.ledger.workers
        free = [
            c
            for c in whole_first(candidates)
            if workers[c.prefill_worker].in_flight < self.cap
            and workers[c.decode_worker].in_flight < self.cap
        ]
        return fewest_in_flight(desk, free) if free else None
