"""One request between arrival and end: its attempt, its legs, its hand-off, its deadline."""

from __future__ import annotations

from dataclasses import dataclass, field

from splitserve.messages import Candidate, GenerateRequest, Handoff, Leg, ReleaseKV

_BATCH_DEADLINE_S = 60.0  # a deadline of minutes or more makes a batch request


def is_batch(request: GenerateRequest) -> bool:
    """True for a request without a latency target: no TTFT, no TPOT, no near deadline."""
    slo = request.slo
    no_targets = slo.ttft_s is None and slo.tpot_s is None
    return no_targets and (slo.deadline_s is None or slo.deadline_s >= _BATCH_DEADLINE_S)


def deadline_of(flight: Flight) -> float:
    """d_r: when its first token (for an end-to-end class: its last) is due."""
    slo = flight.request.slo
    target_s = slo.ttft_s if slo.ttft_s is not None else slo.deadline_s
    return flight.arrived_s + (float("inf") if target_s is None else target_s)


@dataclass(eq=False, slots=True)
class Flight:
    """The scheduler's record of a live request. `legs` maps each running leg to its worker."""

    request: GenerateRequest
    arrived_s: float
    attempt: int = 0
    plan: Candidate | None = None
    legs: dict[Leg, str] = field(default_factory=dict)
    handoff: Handoff | None = None
    failed_workers: tuple[str, ...] = ()
    handoff_failed: bool = False
    dispatched_s: float = 0.0
    prefilled_s: float | None = None
    first_token_s: float | None = None
    moving_bytes: float = 0.0
    used_prompt_tokens: int = 0  # computed for it, as far as anybody has counted them
    used_output_tokens: int = 0

    @property
    def waiting(self) -> bool:
        """True while it sits in the queue."""
        return self.plan is None

    @property
    def streaming(self) -> bool:
        """True once a first token went to the client, after which nothing can be retried."""
        return self.first_token_s is not None

    @property
    def answering(self) -> bool:
        """True while a leg runs that can produce tokens."""
        return Leg.DECODE in self.legs or Leg.AGGREGATED in self.legs

    @property
    def batch(self) -> bool:
        """True for a request without latency targets."""
        return is_batch(self.request)

    def take_release(self, *, consumed: bool) -> list[ReleaseKV]:
        """Return the release of the hand-off this flight holds, once; then it holds none."""
        if self.handoff is None:
            return []
        release = ReleaseKV(self.handoff, consumed)
        self.handoff = None
        return [release]
