"""One worker's latency model: two fits, a drift correction for each phase, and a margin.

Fed by the Scheduler with what the router itself sees; see docs/SCHEDULING.md for the formulas.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from splitserve.performance.coefficients import Coefficients
from splitserve.performance.regression import NonNegativeFit

_DRIFT_WEIGHT = 0.05
_MARGIN_SAMPLES = 200
_MARGIN_START = 1.15
_STALL = 10.0  # a gap this many times longer than predicted tells of something else


@dataclass(slots=True)
class Ratio:
    """Exponentially weighted actual / predicted, clipped, and the mean error beside it."""

    value: float = 1.0
    error: float = 0.0
    samples: int = 0

    def see(self, actual: float, predicted: float) -> None:
        """Take in one pair; `predicted` is the fit's own, before this correction."""
        if predicted <= 0:
            return
        ratio = min(2.0, max(0.5, actual / predicted))
        wrong = abs(actual - predicted * self.value) / max(actual, 1e-9)
        self.value += _DRIFT_WEIGHT * (ratio - self.value)
        self.samples += 1
        self.error += (wrong - self.error) / min(self.samples, 200)


@dataclass(slots=True)
class WorkerModel:
    """Predicts prefill and decode of one worker, in seconds.

    `decode_drift.error` and `prefill_drift.error` are mean relative errors, for people.
    """

    prior: Coefficients
    fixed: bool = False  # exact coefficients given: learn nothing, no margin
    decode_drift: Ratio = field(default_factory=Ratio)
    prefill_drift: Ratio = field(default_factory=Ratio)
    stalls: int = 0
    _now: Coefficients = field(init=False)
    _decode: NonNegativeFit = field(init=False)
    _prefill: NonNegativeFit = field(init=False)
    _ratios: deque[float] = field(default_factory=lambda: deque(maxlen=_MARGIN_SAMPLES))
    _margin: float = _MARGIN_START

    def __post_init__(self) -> None:
        prior = self.prior
        self._now = prior
        self._decode = NonNegativeFit((prior.step_s, prior.per_sequence_s, prior.per_kv_token_s))
        self._prefill = NonNegativeFit(
            (prior.prefill_step_s, prior.per_prompt_token_s, prior.per_prompt_token2_s)
        )
        if self.fixed:
            self._margin = 1.0

    @property
    def coefficients(self) -> Coefficients:
        """The present fit, without drift."""
        return self._now

    @property
    def corrected(self) -> Coefficients:
        """The present fit with both drift corrections in it: what predictions come from."""
        now, decode, prefill = self._now, self.decode_drift.value, self.prefill_drift.value
        return Coefficients(
            now.step_s * decode,
            now.per_sequence_s * decode,
            now.per_kv_token_s * decode,
            now.prefill_step_s * prefill,
            now.per_prompt_token_s * prefill,
            now.per_prompt_token2_s * prefill,
            now.budget_tokens,
        )

    @property
    def margin(self) -> float:
        """How much longer than predicted a prefill may be taken to last: P90 of late ratios."""
        return self._margin

    @property
    def learnt(self) -> bool:
        """True once something was measured here."""
        return bool(self._decode.samples or self._prefill.samples)

    def decode_step_s(self, streams: float, kv_tokens: float) -> float:
        """D(N, K)."""
        return self._now.decode_step_s(streams, kv_tokens) * self.decode_drift.value

    def prefill_s(
        self, prompt_tokens: float, area: float, streams: float, kv_tokens: float
    ) -> float:
        """F(Q, Z|N, K), without margin."""
        seconds = self._now.prefill_s(prompt_tokens, area, streams, kv_tokens)
        return seconds * self.prefill_drift.value

    def saw_decode(self, streams: int, kv_tokens: float, step_s: float) -> None:
        """Learn from one gap of a stream that shared its steps with `streams` in all."""
        predicted_s = self._now.decode_step_s(streams, kv_tokens)
        if step_s > _STALL * predicted_s * self.decode_drift.value and self._decode.samples > 5:
            self.stalls += 1
            return
        self.decode_drift.see(step_s, predicted_s)
        if not self.fixed:
            self._decode.see((1.0, float(streams), float(kv_tokens)), step_s)
            self._adopt(self._decode.samples)

    def saw_prefill(
        self, prompt_tokens: int, area: float, streams: float, kv_tokens: float, took_s: float
    ) -> None:
        """Learn from a prompt that nothing else was waiting beside."""
        now = self._now
        predicted_s = now.prefill_s(prompt_tokens, area, streams, kv_tokens)
        if predicted_s <= 0 or took_s <= 0:
            return
        self.prefill_drift.see(took_s, predicted_s)
        if self.fixed:
            return
        self._note_ratio(took_s / predicted_s)
        n = now.prefill_steps(prompt_tokens, streams)
        beside_s = n * (now.per_sequence_s * streams + now.per_kv_token_s * kv_tokens)
        self._prefill.see((float(n), float(prompt_tokens), area), max(1e-6, took_s - beside_s))
        self._adopt(self._prefill.samples)

    def _note_ratio(self, ratio: float) -> None:
        self._ratios.append(ratio)
        if len(self._ratios) >= 20 and len(self._ratios) % 10 == 0:
            ordered = sorted(self._ratios)
            self._margin = min(1.5, max(1.05, ordered[int(0.9 * (len(ordered) - 1))]))

    def _adopt(self, samples: int) -> None:
        """Put new solutions into the coefficients; between them nothing changes."""
        if samples % 10:
            return
        a, b, c = self._decode.theta
        a_p, p, q = self._prefill.theta
        self._now = Coefficients(a, b, c, a_p, p, q, self.prior.budget_tokens)
