"""One request between arrival and end: its attempt, its legs, its hand-off."""

from __future__ import annotations

from dataclasses import dataclass, field

from splitserve.messages import Candidate, GenerateRequest, Handoff, Leg, ReleaseKV


@dataclass(slots=True)
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
    first_token_s: float | None = None

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

    def take_release(self, *, consumed: bool) -> list[ReleaseKV]:
        """Return the release of the hand-off this flight holds, once; then it holds none."""
        if self.handoff is None:
            return []
        release = ReleaseKV(self.handoff, consumed)
        self.handoff = None
        return [release]
