"""The slow loop, live: every half minute the last minutes are played again under other roles.

The simulation runs in a process of its own at low priority. Only workers whose role is `auto` are
given another one; it is a bias of the router, so nothing is restarted and running requests go on.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

from router.dispatch import Dispatcher
from router.registry import Registry
from splitserve import messages as m
from splitserve.planning.roles import Review, RolePlanner
from splitserve.planning.what_if import ArrivalMemory, Fleet
from splitserve.simulation.trace import TraceRequest

log = logging.getLogger("splitserve.planner")

INTERVAL_S = 30.0


class Planner:
    """Watches arrivals and reviews the roles of `auto` workers."""

    def __init__(self, dispatcher: Dispatcher, registry: Registry) -> None:
        self._dispatcher = dispatcher
        self._registry = registry
        self._memory = ArrivalMemory()
        self._planner = RolePlanner()
        self._pool: ProcessPoolExecutor | None = None
        self.last: Review | None = None
        dispatcher.on_event = self.see

    def see(self, event: m.Event, now_s: float) -> None:
        """Remember what arrives and how long its answers are."""
        match event:
            case m.RequestArrived(request):
                self._memory.arrived(request, now_s)
            case m.DecodeFinished():
                self._memory.finished(event.request_id, event.output_tokens)
            case _:
                pass

    async def run(self, interval_s: float = INTERVAL_S) -> None:
        """Review for ever; cancelled at shutdown."""
        try:
            while True:
                await asyncio.sleep(interval_s)
                await self.review_once()
        finally:
            if self._pool is not None:
                self._pool.shutdown(wait=False, cancel_futures=True)

    async def review_once(self) -> Review | None:
        """One review; None when no worker's role is ours to choose."""
        fleet = self._fleet()
        if sum(worker.role is m.Role.AUTO for worker in fleet.workers) < 2:
            return None
        loop = asyncio.get_running_loop()
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(1, context, initializer=_be_nice)
        try:
            self._planner, review = await loop.run_in_executor(
                self._pool, _review, self._planner, fleet, self._memory.trace()
            )
        except BrokenProcessPool as error:
            log.warning("the role review ended early and is tried again later: %s", error)
            self._pool = None
            return None
        self.last = review
        log.info("roles: %s", review.reason)
        for worker_id, role in (review.adopted or {}).items():
            self._registry.assign(worker_id, role)
        return review

    def _fleet(self) -> Fleet:
        accounts = self._dispatcher.scheduler.ledger.workers
        workers = tuple(
            replace(a.snapshot, role=m.Role.AUTO) if a.snapshot.soft_role else a.snapshot
            for a in accounts.values()
        )
        speeds = {worker_id: a.model.coefficients for worker_id, a in accounts.items()}
        rates = [link.rate_bytes_s for link in self._dispatcher.scheduler.links.pairs.values()]
        measured = [rate for rate in rates if rate > 0]
        return Fleet(workers, speeds, min(measured, default=0.0))


def _be_nice() -> None:
    os.nice(10)


def _review(
    planner: RolePlanner, fleet: Fleet, trace: list[TraceRequest]
) -> tuple[RolePlanner, Review]:
    return planner, planner.review(fleet, trace)
