"""llm-d's default scorers: queue, KV use and prefix match, weighted 2, 2 and 3."""

from __future__ import annotations

from collections.abc import Sequence

from splitserve.messages import Candidate, GenerateRequest
from splitserve.scheduling.desk import Desk
from splitserve.scheduling.policies.immediate import ImmediatePolicy
from splitserve.scheduling.policies.shortlist import hit_share, ids, kv_use, whole_first


class LlmD(ImmediatePolicy):
    """Highest 2 (qmax - q) / (qmax - qmin) + 2 (1 - kv_use) + 3 hit share; ties to the lowest id.

    q counts unanswered prompts. A split plan takes queue and hits from its prefill worker, KV use
    from its decode worker.
    """

    def __init__(self, queue: float = 2.0, kv: float = 2.0, prefix: float = 3.0) -> None:
        self._queue, self._kv, self._prefix = queue, kv, prefix

    def choose(
        self, request: GenerateRequest, candidates: Sequence[Candidate], desk: Desk
    ) -> Candidate | None:
        """Return the candidate with the highest score."""
        known = whole_first(candidates)
        queues = {c: desk.ledger.workers[c.prefill_worker].pending for c in known}
        most, least = max(queues.values()), min(queues.values())

        def score(candidate: Candidate) -> float:
            queue = (most - queues[candidate]) / (most - least) if most > least else 1.0
            free_kv = 1 - kv_use(desk, candidate.decode_worker)
            hits = hit_share(desk, candidate, request)
            return self._queue * queue + self._kv * free_kv + self._prefix * hits

        return min(known, key=lambda c: (-score(c), *ids(c)))
