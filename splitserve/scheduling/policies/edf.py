"""Earliest deadline first, without guards: the classic order, and nothing that keeps it safe."""

from __future__ import annotations

from splitserve.scheduling.desk import Desk
from splitserve.scheduling.flight import Flight, deadline_of
from splitserve.scheduling.policies.least_requests import LeastRequests


class EarliestDeadline(LeastRequests):
    """Order of deadlines, each request to the fewest in flight as soon as one may take it."""

    def order(self, desk: Desk, now_s: float) -> list[Flight]:
        """Earliest deadline first; batch, whose deadline is hours away, comes last."""
        return sorted(desk.waiting.values(), key=lambda f: (deadline_of(f), f.arrived_s))
