"""Adopt a proposal only when it is clearly better, and twice in a row: a step must not flap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from splitserve.messages import Role
from splitserve.planning.what_if import Fleet, goodput, proposals
from splitserve.simulation.trace import TraceRequest

LEAST_GAIN = 0.02
LEAST_REQUESTS = 30  # fewer say nothing about the load
Roles = Mapping[str, Role]


@dataclass(frozen=True, slots=True)
class Review:
    """One look at the roles: what each choice would have given, and what was decided and why."""

    considered: tuple[tuple[dict[str, Role], float], ...]
    best: dict[str, Role]
    gain: float
    adopted: dict[str, Role] | None
    reason: str


@dataclass(slots=True)
class RolePlanner:
    """Keeps the present roles and what last looked better."""

    present: dict[str, Role] = field(default_factory=dict)
    _pending: dict[str, Role] | None = None

    def review(self, fleet: Fleet, trace: list[TraceRequest]) -> Review:
        """Try every proposal on `trace`; adopt one that won by `LEAST_GAIN` twice running."""
        considered = (
            [(roles, goodput(fleet, trace, roles)) for roles in proposals(fleet)]
            if len(trace) >= LEAST_REQUESTS
            else []
        )
        if not considered:
            self._pending = None
            why = f"{len(trace)} requests in the last minutes are too few to plan by"
            return Review((), dict(self.present), 0.0, None, why)
        now = next((g for roles, g in considered if roles == self._full(fleet)), 0.0)
        best, share = max(considered, key=lambda pair: pair[1])
        gain = share - now
        return self._decide(tuple(considered), best, gain)

    def _full(self, fleet: Fleet) -> dict[str, Role]:
        """Present roles of the `auto` workers; those never planned are mixed."""
        auto = [w.worker_id for w in fleet.workers if w.role is Role.AUTO]
        return {w: self.present.get(w, Role.AUTO) for w in auto}

    def _decide(
        self,
        considered: tuple[tuple[dict[str, Role], float], ...],
        best: dict[str, Role],
        gain: float,
    ) -> Review:
        if gain < LEAST_GAIN:
            self._pending = None
            why = f"the best choice is {gain:+.1%} better; {LEAST_GAIN:.0%} are asked for"
            return Review(considered, best, gain, None, why)
        if self._pending != best:
            self._pending = best
            return Review(considered, best, gain, None, f"{gain:+.1%}: once more before it is done")
        self._pending = None
        self.present = dict(best)
        return Review(considered, best, gain, dict(best), f"{gain:+.1%} twice in a row")
