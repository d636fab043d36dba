"""llm-d's latency-aware scorer: by predicted headroom against the request's targets."""

from __future__ import annotations

import random
from collections.abc import Sequence

from splitserve.messages import Candidate, GenerateRequest
from splitserve.scheduling.desk import Desk
from splitserve.scheduling.policies.immediate import ImmediatePolicy
from splitserve.scheduling.policies.shortlist import ids, in_flight, whole_first

_NO_TARGET_S = 3600.0


class LlmDSlo(ImmediatePolicy):
    """The tightest candidate that keeps both targets; 1 in 100 times one that does not.

    Headroom is 0.8 of the TTFT's and 0.2 of the TPOT's. Where none keeps both: idle workers, then
    those late in TPOT only, in TTFT only, in both, the least late first.
    """

    def __init__(self, seed: int = 0) -> None:
        self._draw = random.Random(seed)

    def choose(
        self, request: GenerateRequest, candidates: Sequence[Candidate], desk: Desk
    ) -> Candidate | None:
        """Return the candidate that llm-d would take for these predictions."""
        ttft_s, tpot_s = request.slo.ttft_s or _NO_TARGET_S, request.slo.tpot_s or _NO_TARGET_S

        def room(c: Candidate) -> float:
            return 0.8 * (ttft_s - c.predicted_ttft_s) + 0.2 * (tpot_s - c.predicted_tpot_s)

        def late(c: Candidate) -> int:
            return 2 * (c.predicted_ttft_s > ttft_s) + (c.predicted_tpot_s > tpot_s)

        known = whole_first(candidates)
        bad = [c for c in known if late(c)]
        good = [c for c in known if not late(c)]
        if good and not (bad and self._draw.random() >= 0.99):
            return min(good, key=lambda c: (room(c), *ids(c)))
        tiers = {c: late(c) if in_flight(desk, c) else 0 for c in bad}
        return min(bad, key=lambda c: (tiers[c], -room(c), *ids(c)))
