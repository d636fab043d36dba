"""Random: any worker, each as likely as another."""

from __future__ import annotations

import random
from collections.abc import Sequence

from splitserve.messages import Candidate, GenerateRequest
from splitserve.scheduling.desk import Desk
from splitserve.scheduling.policies.immediate import ImmediatePolicy
from splitserve.scheduling.policies.shortlist import whole_first


class RandomWorker(ImmediatePolicy):
    """Uniform over the feasible candidates. The same seed draws the same."""

    def __init__(self, seed: int = 0) -> None:
        self._draw = random.Random(seed)

    def choose(
        self, request: GenerateRequest, candidates: Sequence[Candidate], desk: Desk
    ) -> Candidate | None:
        """Return a candidate drawn at random."""
        return self._draw.choice(whole_first(candidates))
