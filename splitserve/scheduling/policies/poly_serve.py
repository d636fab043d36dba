"""PolyServe: fill one worker as far as its targets allow before the next is touched."""

from __future__ import annotations

from collections.abc import Sequence

from splitserve.messages import Candidate, GenerateRequest
from splitserve.scheduling.desk import Desk
from splitserve.scheduling.policies.immediate import ImmediatePolicy
from splitserve.scheduling.policies.shortlist import (
    fewest_in_flight,
    ids,
    in_flight,
    whole_first,
)


class PolyServe(ImmediatePolicy):
    """The busiest worker predicted to keep the request's targets, else the least busy one.

    On a fixed fleet this is PolyServe's rule for one bin; it saves workers, not latency.
    """

    def choose(
        self, request: GenerateRequest, candidates: Sequence[Candidate], desk: Desk
    ) -> Candidate | None:
        """Return the tightest fit."""
        slo, known = request.slo, whole_first(candidates)
        fits = [
            c
            for c in known
            if (slo.ttft_s is None or c.predicted_ttft_s <= slo.ttft_s)
            and (slo.tpot_s is None or c.predicted_tpot_s <= slo.tpot_s)
        ]
        if not fits or (slo.ttft_s is None and slo.tpot_s is None):
            return fewest_in_flight(desk, known)
        return min(fits, key=lambda c: (-in_flight(desk, c), *ids(c)))
