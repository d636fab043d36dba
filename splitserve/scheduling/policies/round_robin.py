"""Round robin: each worker in turn, however busy it is."""

from __future__ import annotations

from collections.abc import Sequence

from splitserve.messages import Candidate, GenerateRequest
from splitserve.scheduling.desk import Desk
from splitserve.scheduling.policies.immediate import ImmediatePolicy
from splitserve.scheduling.policies.shortlist import ids, whole_first


class RoundRobin(ImmediatePolicy):
    """The worker whose last turn is longest ago; prefill and decode workers turn separately."""

    def __init__(self) -> None:
        self._turn = 0
        self._last: dict[str, int] = {}

    def choose(
        self, request: GenerateRequest, candidates: Sequence[Candidate], desk: Desk
    ) -> Candidate | None:
        """Return the candidate whose turn it is."""

        def last(candidate: Candidate) -> tuple[int, int, str, str]:
            prefill, decode = ids(candidate)
            return self._last.get(prefill, 0), self._last.get(decode, 0), prefill, decode

        chosen = min(whole_first(candidates), key=last)
        self._turn += 1
        self._last[chosen.prefill_worker] = self._last[chosen.decode_worker] = self._turn
        return chosen
