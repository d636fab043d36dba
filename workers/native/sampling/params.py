"""What a client may ask of sampling."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Validated sampling wishes. `logprobs` None: none; n: the chosen token and its n rivals.

    `seed` is always set: the edge draws one where the client named none.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int = 16
    logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        """True when the likeliest token is taken."""
        return self.temperature <= 1e-5

    @property
    def adjusts_logits(self) -> bool:
        """True when logits depend on what was generated before, or on a bias."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.logit_bias
        )
