"""Who may serve a request at all: by model, role, failures and wishes; nothing about time."""

from __future__ import annotations

from splitserve import messages as m
from splitserve.scheduling.desk import Desk
from splitserve.scheduling.flight import Flight
from splitserve.scheduling.ledger import WorkerAccount
from splitserve.scheduling.plans import untried

_MIXED = frozenset({m.Role.AGGREGATED, m.Role.AUTO})


class Eligible:
    """Answers for one instant: `begin` forgets what was found before."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._usable: dict[str, list[WorkerAccount]] = {}
        self._whole: dict[str, list[WorkerAccount]] = {}
        self._movers: dict[str, bool] = {}

    def begin(self) -> None:
        """Reports, roles or bookings may have changed."""
        self._usable.clear()
        self._whole.clear()
        self._movers.clear()

    def usable(self, request: m.GenerateRequest) -> list[WorkerAccount]:
        """Workers that serve the model and take new work."""
        known = self._usable.get(request.model)
        if known is None:
            serving = self._desk.ledger.serving(request.model)
            known = self._usable[request.model] = [a for a in serving if not a.snapshot.draining]
        return known

    def alive(self, flight: Flight) -> list[WorkerAccount]:
        """Usable workers that have not failed this request, or all where none is left."""
        return untried(self.usable(flight.request), flight.failed_workers, self._desk.ledger.pairs)

    def whole(self, flight: Flight) -> list[WorkerAccount]:
        """Workers that may run it whole and have not all the requests they take."""
        request = flight.request
        if request.forced_plan is m.PlanKind.DISAGGREGATED:
            return []
        plain = not (flight.failed_workers or flight.handoff_failed or request.unsplittable)
        if plain and request.forced_plan is None and request.forced_worker is None:
            known = self._whole.get(request.model)
            if known is None:
                known = self._whole[request.model] = self._open(flight)
            return known
        return self._open(flight)

    def moves_kv(self, model: str) -> bool:
        """True when at least two workers of the model have a way to move KV."""
        known = self._movers.get(model)
        if known is None:
            serving = self._desk.ledger.serving(model)
            known = self._movers[model] = sum(bool(a.snapshot.connector) for a in serving) > 1
        return known

    def _open(self, flight: Flight) -> list[WorkerAccount]:
        wanted = flight.request.forced_worker
        return [
            a
            for a in self._allowed(flight)
            if wanted in (None, a.worker_id) and a.in_flight < a.snapshot.max_running
        ]

    def _allowed(self, flight: Flight) -> list[WorkerAccount]:
        """Workers that may run a request whole: those meant to, else decode workers, else any.

        A worker whose role was declared does not run whole what a pair can split.
        """
        request = flight.request
        accounts = self.alive(flight)
        able = [a for a in accounts if not a.snapshot.splits_only]
        mixed = [a for a in able if a.snapshot.role in _MIXED or a.snapshot.soft_role]
        splittable = not request.unsplittable and not flight.handoff_failed
        forced = request.forced_plan is m.PlanKind.AGGREGATED
        any_pair = self._desk.ledger.pairs.any
        if mixed or (splittable and not forced and any_pair(a.snapshot for a in accounts)):
            return mixed
        return [a for a in able if a.snapshot.role is m.Role.DECODE] or able
