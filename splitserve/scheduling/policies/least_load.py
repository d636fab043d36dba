"""SMG's least-load rule: seconds of queued work, and a penalty that grows as KV fills up."""

from __future__ import annotations

from collections.abc import Sequence

from splitserve.messages import Candidate, GenerateRequest
from splitserve.scheduling.desk import Desk
from splitserve.scheduling.policies.immediate import ImmediatePolicy
from splitserve.scheduling.policies.shortlist import ids, kv_use, whole_first

_UNKNOWN_TOK_S = 2000.0


class LeastLoad(ImmediatePolicy):
    """Lowest (queued + in-flight tokens) / throughput + 0.15 k / (1 - k), k the KV use."""

    def choose(
        self, request: GenerateRequest, candidates: Sequence[Candidate], desk: Desk
    ) -> Candidate | None:
        """Return the candidate with the least load."""

        def load(candidate: Candidate) -> float:
            prefill = desk.ledger.workers[candidate.prefill_worker]
            decode = desk.ledger.workers[candidate.decode_worker]
            tokens = prefill.pending_prefill_tokens + decode.kv_streams_tokens
            full = min(0.99, kv_use(desk, candidate.decode_worker))
            rate = prefill.snapshot.prefill_tok_s or _UNKNOWN_TOK_S
            return tokens / rate + 0.15 * full / (1 - full)

        return min(whole_first(candidates), key=lambda c: (load(c), *ids(c)))
