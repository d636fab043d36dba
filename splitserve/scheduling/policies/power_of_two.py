"""Power of two choices: two workers at random, then the less busy of them (Mitzenmacher, 1996)."""

from __future__ import annotations

import random
from collections.abc import Sequence

from splitserve.messages import Candidate, GenerateRequest
from splitserve.scheduling.desk import Desk
from splitserve.scheduling.policies.immediate import ImmediatePolicy
from splitserve.scheduling.policies.shortlist import fewest_in_flight, whole_first


class PowerOfTwo(ImmediatePolicy):
    """Fewest in flight of two drawn at random. The same seed draws the same."""

    def __init__(self, seed: int = 0) -> None:
        self._draw = random.Random(seed)

    def choose(
        self, request: GenerateRequest, candidates: Sequence[Candidate], desk: Desk
    ) -> Candidate | None:
        """Return the less busy of two candidates."""
        known = whole_first(candidates)
        return fewest_in_flight(desk, self._draw.sample(known, min(2, len(known))))
