"""Least requests: the worker with the fewest requests in flight."""

from __future__ import annotations

from collections.abc import Sequence

from splitserve.messages import Candidate, GenerateRequest
from splitserve.scheduling.desk import Desk
from splitserve.scheduling.policies.immediate import ImmediatePolicy
from splitserve.scheduling.policies.shortlist import fewest_in_flight, whole_first


class LeastRequests(ImmediatePolicy):
    """Fewest in flight, of both workers where the plan has two."""

    def choose(
        self, request: GenerateRequest, candidates: Sequence[Candidate], desk: Desk
    ) -> Candidate | None:
        """Return the least busy candidate."""
        return fewest_in_flight(desk, whole_first(candidates))
