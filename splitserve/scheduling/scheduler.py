"""`Scheduler.step`: one event in, commands out. No clock, no sockets, no randomness."""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from splitserve import messages as m
from splitserve.performance.coefficients import area
from splitserve.performance.lengths import Lengths
from splitserve.performance.links import Links
from splitserve.scheduling.desk import Desk, SchedulerLimits
from splitserve.scheduling.flight import Flight
from splitserve.scheduling.ledger import Booking, Ledger
from splitserve.scheduling.policies import Accountant, Policy
from splitserve.scheduling.policies.least_work import LeastWork

Commands = list[m.Command]


class Scheduler:
    """Owns every live request. The only writer is whoever calls `step`, from one thread.

    Promises, held by tests/unit/core: every request ends exactly once (DecodeFinished, Reject or
    RequestCancelled), every hand-off is released exactly once, no worker is over its limit.
    """

    def __init__(
        self,
        policy: Policy | None = None,
        limits: SchedulerLimits | None = None,
        lengths: Lengths | None = None,
    ) -> None:
        self._policy: Policy = policy or LeastWork()
        accountant: object = policy
        self._accountant = accountant if isinstance(accountant, Accountant) else None
        self._desk = Desk(limits or SchedulerLimits(), lengths=lengths or Lengths())

    # --- what others may look at ----------------------------------------------------------------

    @property
    def ledger(self) -> Ledger:
        """Workers, their models and what is booked on them; to read, not to write."""
        return self._desk.ledger

    @property
    def links(self) -> Links:
        """What is known of links; to read, and to declare a rate before traffic."""
        return self._desk.links

    @property
    def queued(self) -> int:
        """Requests that wait for a worker."""
        return len(self._desk.waiting)

    @property
    def live(self) -> int:
        """Requests that have arrived and not ended."""
        return len(self._desk.flights)

    def holds(self, request_id: str) -> bool:
        """True while a request has not ended here."""
        return request_id in self._desk.flights

    # --- events ---------------------------------------------------------------------------------

    def step(self, event: m.Event, now_s: float) -> Commands:
        """Take one event in and return what to do about it, in order."""
        self._desk.assume_first_tokens(now_s)
        self._desk.ledger.lift_quarantines(now_s)
        self._take(event, now_s)
        self._settle()
        self._pump(now_s)
        self._settle()
        commands, self._desk.commands = self._desk.commands, []
        return commands

    def _take(self, event: m.Event, now_s: float) -> None:
        match event:
            case m.RequestArrived(request):
                self._arrived(request, now_s)
            case m.HandoffReady():
                self._handoff_ready(event)
            case m.PrefillFinished():
                self._prefill_finished(event, now_s)
            case m.FirstToken():
                self._first_token(event, now_s)
            case m.StreamsAdvanced(progress):
                self._advanced(progress)
            case m.DecodeFinished():
                self._decode_finished(event, now_s)
            case m.LegFailed():
                self._leg_failed(event)
            case m.RequestCancelled(request_id):
                self._cancelled(request_id)
            case m.WorkerReported() | m.WorkerLost() | m.PairJudged():
                self._fleet_changed(event)
            case m.TimerFired():
                self._desk.woken()
            case _:
                assert_never(event)

    def _fleet_changed(self, event: m.WorkerReported | m.WorkerLost | m.PairJudged) -> None:
        match event:
            case m.WorkerReported(snapshot):
                self._reported(snapshot)
            case m.WorkerLost(worker_id, reason):
                self._worker_lost(worker_id, reason)
            case m.PairJudged():
                self._desk.ledger.judge(event)
            case _:
                assert_never(event)

    def _pump(self, now_s: float) -> None:
        desk = self._desk
        returned, desk.returned = desk.returned, []
        for flight in returned:
            if flight.request.request_id in desk.waiting:
                self._policy.arrived(flight, desk, now_s)
        if desk.waiting:
            self._policy.pump(desk, now_s)

    def _settle(self) -> None:
        ended, self._desk.ended = self._desk.ended, []
        if self._accountant is None:
            return
        for flight in ended:
            self._accountant.ended(flight, flight.used_prompt_tokens, flight.used_output_tokens)

    def _arrived(self, request: m.GenerateRequest, now_s: float) -> None:
        desk = self._desk
        request_id = request.request_id
        assert request_id not in desk.flights, f"{request_id} arrived twice"
        if len(desk.waiting) >= desk.limits.queue:
            wait_s = min(60.0, max(1.0, desk.limits.max_wait_s / 2))
            detail = f"the queue is full: {len(desk.waiting)} requests wait"
            desk.commands.append(m.Reject(request_id, m.Refusal.QUEUE_FULL, detail, wait_s))
            return
        if request.prompt_is_estimate:
            tokens = desk.prompts.apply(request.model, request.prompt_tokens)
            if tokens != request.prompt_tokens:
                request = replace(request, prompt_tokens=tokens)
        if request.several_prompts and not desk.runs_whole(request):
            request = replace(request, unsplittable="")
        flight = Flight(request, now_s)
        desk.flights[request_id] = desk.waiting[request_id] = flight
        self._policy.arrived(flight, desk, now_s)

    def _handoff_ready(self, event: m.HandoffReady) -> None:
        flight = self._current(event.request_id, event.attempt)
        commands = self._desk.commands
        if flight is None or m.Leg.DECODE in flight.legs or flight.plan is None:
            commands.append(m.ReleaseKV(event.handoff, consumed=False))
            return
        flight.handoff = event.handoff
        decode = flight.plan.decode_worker
        flight.legs[m.Leg.DECODE] = decode
        commands.append(m.StartDecode(event.request_id, event.attempt, decode, event.handoff))

    def _prefill_finished(self, event: m.PrefillFinished, now_s: float) -> None:
        flight = self._current(event.request_id, event.attempt)
        if flight is None:
            return
        worker_id = flight.legs.get(m.Leg.PREFILL)
        booking = self._desk.end_leg(flight, m.Leg.PREFILL)
        if worker_id is None or booking is None:
            return
        flight.prefilled_s = now_s
        took_s = event.prefill_s or now_s - booking.dispatched_s
        cached = event.cached_tokens if event.prompt_tokens else booking.cached_tokens
        fresh = (event.prompt_tokens or flight.request.prompt_tokens) - cached
        self._learn_prefill(worker_id, booking, fresh, cached, took_s)

    def _learn_prefill(
        self, worker_id: str, booking: Booking, fresh: int, cached: int, took_s: float
    ) -> None:
        account = self._desk.ledger.workers.get(worker_id)
        if account is not None and booking.alone and fresh > 0:
            account.model.saw_prefill(
                fresh, area(fresh, cached), booking.streams_then, booking.kv_then, took_s
            )

    def _learn_bound(self, flight: Flight, now_s: float) -> None:
        """An answer that was not streamed shows no first token, but its prefill took no longer
        than all of it: that corrects a model which thinks the worker slower than that.
        """
        assert flight.plan is not None
        worker_id = flight.plan.decode_worker
        account = self._desk.ledger.workers.get(worker_id)
        key = (flight.request.request_id, flight.attempt, m.Leg.AGGREGATED)
        booking = account.bookings.get(key) if account is not None else None
        if account is None or booking is None:
            return
        took_s = now_s - booking.dispatched_s
        fresh, cached = booking.uncached_tokens, booking.cached_tokens
        if took_s < account.model.prefill_s(fresh, booking.area, 0, 0):
            self._learn_prefill(worker_id, booking, fresh, cached, took_s)

    def _first_token(self, event: m.FirstToken, now_s: float) -> None:
        flight = self._current(event.request_id, event.attempt)
        if flight is None or flight.plan is None or flight.streaming or not flight.answering:
            return
        flight.first_token_s = now_s
        flight.used_output_tokens = 1
        plan = flight.plan
        whole = plan.plan is m.PlanKind.AGGREGATED
        leg = m.Leg.AGGREGATED if whole else m.Leg.DECODE
        key = (event.request_id, event.attempt, leg)
        account = self._desk.ledger.workers.get(plan.decode_worker)
        if account is not None:
            booking = account.bookings.get(key)
            if whole and booking is not None:
                took_s = now_s - booking.dispatched_s
                fresh, cached = booking.uncached_tokens, booking.cached_tokens
                self._learn_prefill(plan.decode_worker, booking, fresh, cached, took_s)
            account.first_token(key, now_s)
        if not whole:
            self._desk.arrived_at_decode(flight)
            link = self._desk.links.of(plan.prefill_worker, plan.decode_worker)
            link.see(event.transfer_bytes, event.transfer_s)
        self._desk.commands += flight.take_release(consumed=True)

    def _advanced(self, progress: tuple[tuple[str, int, int, float], ...]) -> None:
        for request_id, attempt, tokens, at_s in progress:
            flight = self._current(request_id, attempt)
            if flight is None or flight.plan is None:
                continue
            flight.used_output_tokens = max(flight.used_output_tokens, tokens)
            account = self._desk.ledger.workers.get(flight.plan.decode_worker)
            if account is not None:
                whole = flight.plan.plan is m.PlanKind.AGGREGATED
                leg = m.Leg.AGGREGATED if whole else m.Leg.DECODE
                account.progress((request_id, attempt, leg), tokens, at_s)

    def _decode_finished(self, event: m.DecodeFinished, now_s: float) -> None:
        flight = self._current(event.request_id, event.attempt)
        if flight is None or flight.plan is None or not flight.answering:
            return
        request = flight.request
        if not request.streamed and flight.plan.plan is m.PlanKind.AGGREGATED:
            self._learn_bound(flight, now_s)
        if event.output_tokens > 0:
            self._desk.lengths.see(request, event.output_tokens)
        if request.prompt_is_estimate:
            self._desk.prompts.see(request.model, request.prompt_tokens, event.prompt_tokens)
        self._count_use(flight, event)
        self._desk.forget(flight)
        self._desk.commands += flight.take_release(consumed=True)

    @staticmethod
    def _count_use(flight: Flight, event: m.DecodeFinished) -> None:
        """Take the engine's own counts. After a hand-off its cached tokens are those it was given,
        which were computed all the same.
        """
        if event.prompt_tokens:
            whole = flight.plan is not None and flight.plan.plan is m.PlanKind.AGGREGATED
            cached = event.cached_tokens if whole else 0
            flight.used_prompt_tokens = max(0, event.prompt_tokens - cached)
        flight.used_output_tokens = event.output_tokens or flight.used_output_tokens

    def _leg_failed(self, event: m.LegFailed) -> None:
        flight = self._current(event.request_id, event.attempt)
        if flight is not None and event.leg in flight.legs:
            self._fail(flight, event)

    def _cancelled(self, request_id: str) -> None:
        flight = self._desk.flights.get(request_id)
        if flight is not None:
            waiting = flight.waiting
            self._desk.commands += self._desk.abandon(flight)
            self._desk.forget(flight)
            if waiting:
                self._policy.left(flight)

    def _reported(self, snapshot: m.WorkerSnapshot) -> None:
        desk = self._desk
        known = desk.ledger.workers.get(snapshot.worker_id)
        if known is not None:
            desk.lose_prefixes(known.snapshot, snapshot)
        desk.ledger.report(snapshot)
        blocks = max(1, snapshot.kv_capacity_tokens // 512) if snapshot.kv_capacity_tokens else 0
        if blocks:
            desk.prefix.bound(snapshot.worker_id, blocks)

    def _worker_lost(self, worker_id: str, reason: str) -> None:
        desk = self._desk
        for flight in list(desk.flights.values()):
            lost = [leg for leg, worker in flight.legs.items() if worker == worker_id]
            booked = flight.plan is not None and flight.plan.decode_worker == worker_id
            if lost or booked:
                leg = lost[0] if lost else m.Leg.DECODE
                event = m.LegFailed(
                    flight.request.request_id,
                    flight.attempt,
                    leg,
                    worker_id,
                    m.Failure.WORKER_LOST,
                    reason,
                )
                self._fail(flight, event)
        desk.ledger.lose(worker_id)
        desk.links.forget(worker_id)
        desk.prefix.forget(worker_id)

    # --- ending and retrying --------------------------------------------------------------------

    def _fail(self, flight: Flight, event: m.LegFailed) -> None:
        """End this attempt; queue another one when that is allowed and can help."""
        desk = self._desk
        broken = flight.streaming and event.leg is not m.Leg.PREFILL
        if flight.streaming and not broken:  # the KV is across; prefill no longer matters
            desk.end_leg(flight, m.Leg.PREFILL)
            return
        plan = flight.plan
        if not flight.streaming:  # a worker's failure is not on the tenant's account
            flight.used_prompt_tokens = 0
        # A leg on a lost worker has not ended by itself: the edge must let go of it.
        ended = None if event.failure is m.Failure.WORKER_LOST else event.leg
        desk.commands += desk.abandon(flight, ended=ended)
        if broken or event.final or flight.attempt >= desk.limits.attempts:
            desk.forget(flight)
            refusal = m.Refusal.BROKEN if broken else m.Refusal.FAILED
            detail = f"{event.leg} on {event.worker_id}: {event.detail or event.failure}"
            choice = m.Choice((plan,), plan) if plan is not None else m.Choice()
            reject = m.Reject(flight.request.request_id, refusal, detail, choice=choice)
            desk.commands.append(reject)
            return
        flight.failed_workers = (*flight.failed_workers, event.worker_id)
        if event.failure is m.Failure.HANDOFF and desk.runs_whole(flight.request):
            flight.handoff_failed = True
        desk.requeue(flight)

    def _current(self, request_id: str, attempt: int) -> Flight | None:
        flight = self._desk.flights.get(request_id)
        return flight if flight and flight.attempt == attempt and not flight.waiting else None
