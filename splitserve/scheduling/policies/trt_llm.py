"""TensorRT-LLM's cache-aware router: the share that matches, less a little per request."""

from __future__ import annotations

from collections.abc import Sequence

from splitserve.messages import Candidate, GenerateRequest
from splitserve.scheduling.desk import Desk
from splitserve.scheduling.policies.immediate import ImmediatePolicy
from splitserve.scheduling.policies.shortlist import ids, in_flight, uncached, whole_first

_BLOCK_TOKENS = 32


class TrtLlm(ImmediatePolicy):
    """Highest matched / padded prompt tokens - requests in flight / 64, in blocks of 32 tokens."""

    def choose(
        self, request: GenerateRequest, candidates: Sequence[Candidate], desk: Desk
    ) -> Candidate | None:
        """Return the candidate with the highest score."""
        padded_tokens = -(-max(1, request.prompt_tokens) // _BLOCK_TOKENS) * _BLOCK_TOKENS

        def score(candidate: Candidate) -> float:
            hit_tokens = request.prompt_tokens - uncached(desk, candidate, request)
            matched_tokens = hit_tokens // _BLOCK_TOKENS * _BLOCK_TOKENS
            return matched_tokens / padded_tokens - in_flight(desk, candidate) / 64

        return min(whole_first(candidates), key=lambda c: (-score(c), *ids(c)))
