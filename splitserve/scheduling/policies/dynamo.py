"""NVIDIA Dynamo's KV router: everything counted in KV blocks, to compute and to hold."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from splitserve.messages import Candidate, GenerateRequest
from splitserve.scheduling.desk import Desk
from splitserve.scheduling.policies.immediate import ImmediatePolicy
from splitserve.scheduling.policies.shortlist import split, uncached, whole

_BLOCK_TOKENS = 16


class Dynamo(ImmediatePolicy):
    """Lowest max(0, pending prefill + prompt - hits) + KV blocks held and incoming; ties drawn.

    The first part belongs to the worker that prefills, the second to the one that decodes, so a
    split plan is priced as Dynamo's two pools are. `pools` splits where a pair is feasible, unless
    little is left to prefill: under `local_tokens` uncached tokens and `local_share` of the prompt.
    """

    def __init__(
        self,
        *,
        pools: bool = False,
        local_tokens: int = 2048,
        local_share: float = 0.7,
        seed: int = 0,
    ) -> None:
        self._pools = pools
        self._local_tokens, self._local_share = local_tokens, local_share
        self._draw = random.Random(seed)

    def choose(
        self, request: GenerateRequest, candidates: Sequence[Candidate], desk: Desk
    ) -> Candidate | None:
        """Return a candidate of the lowest cost."""
        local, pairs = whole(candidates), split(candidates)
        fresh_tokens = min((uncached(desk, c, request) for c in local), default=math.inf)
        limit_tokens = min(self._local_tokens, self._local_share * request.prompt_tokens)
        remote = bool(pairs) and self._pools and fresh_tokens >= limit_tokens
        known = pairs if remote or not local else local
        costs = [block_cost(desk, c, request) for c in known]
        lowest = min(costs)
        return self._draw.choice(
            [c for c, cost in zip(known, costs, strict=True) if cost == lowest]
        )


def block_cost(desk: Desk, candidate: Candidate, request: GenerateRequest) -> float:
    """Blocks to compute on the prefill worker, and blocks held on the decode worker then."""
    prefill = desk.ledger.workers[candidate.prefill_worker]
    decode = desk.ledger.workers[candidate.decode_worker]
    blocks = math.ceil(request.prompt_tokens / _BLOCK_TOKENS)
    hits = (request.prompt_tokens - uncached(desk, candidate, request)) // _BLOCK_TOKENS
    compute = max(0.0, prefill.pending_prefill_tokens / _BLOCK_TOKENS + blocks - hits)
    return compute + math.ceil(decode.kv_soon_tokens / _BLOCK_TOKENS) + blocks
