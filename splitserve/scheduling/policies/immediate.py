"""The frame of every simple policy: first come, first served, each request to one chosen plan.

Subclass it and write `choose`; see docs/POLICIES.md.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

from splitserve import messages as m
from splitserve.scheduling.desk import Desk
from splitserve.scheduling.flight import Flight
from splitserve.scheduling.plans import PlanTable


class ImmediatePolicy:
    """Sends each waiting request as soon as some plan is feasible, in order of arrival."""

    def choose(
        self, request: m.GenerateRequest, candidates: Sequence[m.Candidate], desk: Desk
    ) -> m.Candidate | None:
        """Pick one of the feasible candidates, or None to wait."""
        raise NotImplementedError

    def arrived(self, flight: Flight, desk: Desk, now_s: float) -> None:
        """A request waits; the desk knows it already."""

    def left(self, flight: Flight) -> None:
        """A request does not wait any more."""

    def order(self, desk: Desk, now_s: float) -> list[Flight]:
        """Waiting requests in the order in which they are tried."""
        return sorted(desk.waiting.values(), key=lambda f: f.arrived_s)

    def line(self, request: m.GenerateRequest) -> str:
        """Requests of one line wait behind each other; nobody waits for another line."""
        return request.model

    def pump(self, desk: Desk, now_s: float) -> None:
        """Start every waiting request that has a plan; end those that wait in vain."""
        if not desk.waiting:
            return
        blocked: set[str] = set()
        for flight in self.order(desk, now_s):
            request = flight.request
            free = request.forced_plan is None and request.forced_worker is None
            overdue = now_s >= flight.arrived_s + desk.limits.max_wait_s
            line = self.line(request)
            if free and line in blocked and not overdue:
                continue
            if not self._try(flight, desk, now_s) and free:
                blocked.add(line)
        if desk.waiting:
            oldest_s = min(f.arrived_s for f in desk.waiting.values())
            desk.wake_at(oldest_s + desk.limits.max_wait_s)

    def _try(self, flight: Flight, desk: Desk, now_s: float) -> bool:
        request = flight.request
        candidates = PlanTable(desk).candidates(
            request, flight.failed_workers, whole_only=flight.handoff_failed
        )
        feasible = [c for c in candidates if c.feasible]
        chosen = self.choose(request, feasible, desk) if feasible else None
        choice = m.Choice(candidates, chosen)
        if chosen is not None:
            desk.start(flight, chosen, choice, now_s)
            return True
        return decline_if_hopeless(flight, desk, choice, now_s)


def decline_if_hopeless(flight: Flight, desk: Desk, choice: m.Choice, now_s: float) -> bool:
    """End a request that nobody can serve, or that has waited as long as it may."""
    candidates, request = choice.candidates, flight.request
    retry_s: float | None = 1.0
    if not candidates:
        if request.model in desk.ledger.models_seen:
            refusal, detail = m.Refusal.NO_WORKER, f"no worker for model {request.model} is alive"
        else:
            refusal = m.Refusal.UNKNOWN_MODEL
            detail, retry_s = f"no worker serves model {request.model}", None
    elif all(c.why_not.startswith(_lasting(request)) for c in candidates):
        asked = request.forced_plan or request.forced_worker or request.unsplittable
        refusal = m.Refusal.UNPLANNABLE
        detail, retry_s = f"no worker can serve this request as asked ({asked})", None
    elif now_s >= flight.arrived_s + desk.limits.max_wait_s:
        reasons = "; ".join(sorted({c.why_not for c in candidates if c.why_not})[:4])
        refusal = m.Refusal.NO_WORKER
        detail = f"waited {desk.limits.max_wait_s:g} s for a worker; {reasons}"
    else:
        return False
    desk.decline(flight, refusal, detail, retry_s, choice)
    return True


def _lasting(request: m.GenerateRequest) -> tuple[str, ...]:
    """How reasons against a plan begin that no waiting can mend."""
    asked = ("the request asked", "its role")
    whole = request.unsplittable or request.forced_plan is m.PlanKind.AGGREGATED
    return (*asked, "its engine") if whole else asked


def retry_after_s(request_id: str, wait_s: float) -> float:
    """The predicted wait as `Retry-After`, spread so that clients do not return together."""
    digest = hashlib.blake2b(request_id.encode(), digest_size=2).digest()
    spread = 1.0 + 0.25 * int.from_bytes(digest) / 65535
    return min(60.0, max(1.0, math.ceil(spread * wait_s)))
