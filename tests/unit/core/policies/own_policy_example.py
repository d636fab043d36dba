"""A policy in twenty lines: prefill where most of the prompt is cached already."""

from collections.abc import Sequence

from splitserve.messages import Candidate, GenerateRequest
from splitserve.scheduling.desk import Desk
from splitserve.scheduling.policies.immediate import ImmediatePolicy


class MostCached(ImmediatePolicy):
    """Fewest tokens to prefill; ties to the fewest requests in flight, then to the lowest id."""

    def choose(
        self, request: GenerateRequest, candidates: Sequence[Candidate], desk: Desk
    ) -> Candidate | None:
        def cost(candidate: Candidate) -> tuple[int, int, str]:
            worker = desk.ledger.workers[candidate.prefill_worker]
            return desk.uncached(worker, request), worker.in_flight, worker.worker_id

        return min(candidates, key=cost)
