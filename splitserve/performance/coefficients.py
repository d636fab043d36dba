"""The form of the latency model, and coefficients to start from.

decode step       D(N, K)      = a + b N + c K
prefill of (Q, Z) F(Q, Z|N, K) = n (b N + c K) + max(n a, n a_p + p Q + q Z)
engine step       S            = b N + c K + (a, or with P prompt tokens in it
                                 max(a, a_p + p P + q sum P_i (K_i + P_i / 2)))

N streams decode, K KV tokens are held, B is the engine's token budget per step, Q uncached prompt
tokens wait, Z = sum U_i (C_i + U_i / 2), n = ceil(Q / (B - min(N, B/2))). Seconds and tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

DEFAULT_BUDGET_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Coefficients:
    """One worker's speed. Units: seconds, and seconds per sequence, token and token squared."""

    step_s: float  # a
    per_sequence_s: float  # b
    per_kv_token_s: float  # c
    prefill_step_s: float  # a_p
    per_prompt_token_s: float  # p
    per_prompt_token2_s: float  # q
    budget_tokens: int = DEFAULT_BUDGET_TOKENS  # B

    def decode_step_s(self, streams: float, kv_tokens: float) -> float:
        """D(N, K)."""
        return self.step_s + self.per_sequence_s * streams + self.per_kv_token_s * kv_tokens

    def prefill_steps(self, prompt_tokens: float, streams: float) -> int:
        """n: the engine steps that `prompt_tokens` take beside `streams` decodes."""
        room = self.budget_tokens - min(streams, self.budget_tokens / 2)
        return max(1, math.ceil(prompt_tokens / room))

    def prefill_s(
        self, prompt_tokens: float, area: float, streams: float, kv_tokens: float
    ) -> float:
        """F(Q, Z|N, K); 0 when nothing waits."""
        if prompt_tokens <= 0:
            return 0.0
        n = self.prefill_steps(prompt_tokens, streams)
        beside_s = n * (self.per_sequence_s * streams + self.per_kv_token_s * kv_tokens)
        compute_s = (
            n * self.prefill_step_s
            + self.per_prompt_token_s * prompt_tokens
            + self.per_prompt_token2_s * area
        )
        return beside_s + max(n * self.step_s, compute_s)

    def alone_s(self, uncached_tokens: int, cached_tokens: int) -> float:
        """F of one prompt on an idle worker."""
        return self.prefill_s(uncached_tokens, area(uncached_tokens, cached_tokens), 0, 0)

    def step_of(
        self, prompt_tokens: int, prompt_area: float, streams: int, kv_tokens: float
    ) -> float:
        """S: one engine step with `prompt_tokens` of prompt chunks in it."""
        beside_s = self.per_sequence_s * streams + self.per_kv_token_s * kv_tokens
        if prompt_tokens == 0:
            return beside_s + self.step_s
        compute_s = (
            self.prefill_step_s
            + self.per_prompt_token_s * prompt_tokens
            + self.per_prompt_token2_s * prompt_area
        )
        return beside_s + max(self.step_s, compute_s)


def area(uncached_tokens: float, cached_tokens: float) -> float:
    """Z of one prompt: attended pairs, U (C + U/2)."""
    return uncached_tokens * (cached_tokens + uncached_tokens / 2)


# Fitted by least squares to per-layer timings of vLLM 0.19, bfloat16, one GPU.
KNOWN = {
    "rtx4090-llama-3.1-8b": Coefficients(17.0e-3, 0.040e-3, 1.43e-7, 10.7e-3, 0.0825e-3, 4.0e-9),
    "rtxpro6000-llama-3.1-8b": Coefficients(11.1e-3, 0.021e-3, 0.90e-7, 8.9e-3, 0.0327e-3, 2.0e-9),
    "rtxpro6000-qwen3-32b": Coefficients(45.7e-3, 0.093e-3, 1.80e-7, 37.3e-3, 0.146e-3, 7.7e-9),
}


def from_rates(
    prefill_tok_s: float, decode_tok_s: float, budget_tokens: int = DEFAULT_BUDGET_TOKENS
) -> Coefficients:
    """Guess coefficients from two measured rates, for a worker nobody has timed closely."""
    step_s = 1.0 / decode_tok_s if decode_tok_s > 0 else 0.05
    per_token_s = 1.0 / prefill_tok_s if prefill_tok_s > 0 else 2e-3
    return Coefficients(
        step_s=step_s,
        per_sequence_s=0.002 * step_s,
        per_kv_token_s=7e-6 * step_s,
        prefill_step_s=0.75 * step_s,
        per_prompt_token_s=per_token_s,
        per_prompt_token2_s=5e-5 * per_token_s,
        budget_tokens=budget_tokens,
    )
