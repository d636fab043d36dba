"""`Scheduler.step`: one event in, commands out. No clock, no sockets, no randomness."""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from splitserve import messages as m
from splitserve.performance.rates import Rates
from splitserve.scheduling.flight import Flight
from splitserve.scheduling.ledger import Booking, Ledger
from splitserve.scheduling.plans import PlanTable, kv_tokens
from splitserve.scheduling.policies import Policy
from splitserve.scheduling.policies.least_work import LeastWork

Commands = list[m.Command]


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds on what the scheduler holds and how often it tries."""

    queue: int = 4096
    attempts: int = 3
    max_wait_s: float = 60.0


class Scheduler:
    """Owns every live request. The only writer is whoever calls `step`, from one thread.

    Promises, held by tests/unit/core: every request ends exactly once (DecodeFinished, Reject or
    RequestCancelled), every hand-off is released exactly once, no worker is over its limit.
    """

    def __init__(self, policy: Policy | None = None, limits: SchedulerLimits | None = None) -> None:
        self._policy: Policy = policy or LeastWork()
        self._limits = limits or SchedulerLimits()
        self._ledger = Ledger()
        self._rates = Rates()
        self._table = PlanTable(self._ledger, self._rates)
        self._flights: dict[str, Flight] = {}
        self._queue: list[Flight] = []
        self._wake_s: float | None = None

    # --- what others may look at ----------------------------------------------------------------

    @property
    def ledger(self) -> Ledger:
        """Workers and what is booked on them; to read, not to write."""
        return self._ledger

    @property
    def rates(self) -> Rates:
        """The latency model; to read, not to write."""
        return self._rates

    @property
    def queued(self) -> int:
        """Requests that wait for a worker."""
        return len(self._queue)

    @property
    def live(self) -> int:
        """Requests that have arrived and not ended."""
        return len(self._flights)

    # --- events ---------------------------------------------------------------------------------

    def step(self, event: m.Event, now_s: float) -> Commands:
        """Take one event in and return what to do about it, in order."""
        match event:
            case m.RequestArrived(request):
                return self._arrived(request, now_s)
            case m.HandoffReady():
                return self._handoff_ready(event, now_s)
            case m.PrefillFinished():
                return self._prefill_finished(event, now_s)
            case m.FirstToken():
                return self._first_token(event, now_s)
            case m.DecodeFinished():
                return self._decode_finished(event, now_s)
            case m.LegFailed():
                return self._leg_failed(event, now_s)
            case m.RequestCancelled(request_id):
                return self._cancelled(request_id, now_s)
            case m.WorkerReported(snapshot):
                self._ledger.report(snapshot)
                self._rates.of(snapshot.worker_id).adopt(snapshot)
                return self._pump(now_s)
            case m.WorkerLost(worker_id, reason):
                return self._worker_lost(worker_id, reason, now_s)
            case m.TimerFired():
                self._wake_s = None
                return self._pump(now_s)
            case _:
                assert_never(event)

    def _arrived(self, request: m.GenerateRequest, now_s: float) -> Commands:
        assert request.request_id not in self._flights, f"{request.request_id} arrived twice"
        if len(self._queue) >= self._limits.queue:
            wait_s = min(60.0, max(1.0, self._limits.max_wait_s / 2))
            detail = f"the queue is full: {len(self._queue)} requests wait"
            return [m.Reject(request.request_id, m.Refusal.QUEUE_FULL, detail, wait_s)]
        flight = Flight(request, now_s)
        self._flights[request.request_id] = flight
        self._queue.append(flight)
        return self._pump(now_s)

    def _handoff_ready(self, event: m.HandoffReady, now_s: float) -> Commands:
        flight = self._current(event.request_id, event.attempt)
        if flight is None or m.Leg.DECODE in flight.legs or flight.plan is None:
            return [m.ReleaseKV(event.handoff, consumed=False)]
        flight.handoff = event.handoff
        decode = flight.plan.decode_worker
        flight.legs[m.Leg.DECODE] = decode
        return [m.StartDecode(event.request_id, event.attempt, decode, event.handoff)]

    def _prefill_finished(self, event: m.PrefillFinished, now_s: float) -> Commands:
        flight = self._current(event.request_id, event.attempt)
        if flight is None:
            return []
        worker_id = flight.legs.get(m.Leg.PREFILL)
        if worker_id is None:
            return []
        self._rates.of(worker_id).saw_prefill(
            event.prompt_tokens - event.cached_tokens, event.prefill_s
        )
        self._end_leg(flight, m.Leg.PREFILL)
        return self._pump(now_s)

    def _first_token(self, event: m.FirstToken, now_s: float) -> Commands:
        flight = self._current(event.request_id, event.attempt)
        if flight is None or flight.plan is None or flight.streaming or not flight.answering:
            return []
        flight.first_token_s = now_s
        plan, request = flight.plan, flight.request
        if plan.plan is m.PlanKind.DISAGGREGATED:
            self._rates.saw_transfer(
                plan.prefill_worker, plan.decode_worker, event.transfer_bytes, event.transfer_s
            )
        else:
            account = self._ledger.workers.get(plan.prefill_worker)
            if account is not None:
                account.prefill_done((request.request_id, flight.attempt, m.Leg.AGGREGATED))
        return [*flight.take_release(consumed=True), *self._pump(now_s)]

    def _decode_finished(self, event: m.DecodeFinished, now_s: float) -> Commands:
        flight = self._current(event.request_id, event.attempt)
        if flight is None or flight.plan is None or not flight.answering:
            return []
        if flight.first_token_s is not None:
            duration_s = now_s - flight.first_token_s
            rates = self._rates.of(flight.plan.decode_worker)
            rates.saw_decode(event.output_tokens - 1, duration_s)
            if flight.plan.plan is m.PlanKind.AGGREGATED:
                waited_s = flight.first_token_s - flight.dispatched_s
                rates.saw_prefill(event.prompt_tokens - event.cached_tokens, waited_s)
        self._forget(flight)
        return [*flight.take_release(consumed=True), *self._pump(now_s)]

    def _leg_failed(self, event: m.LegFailed, now_s: float) -> Commands:
        flight = self._current(event.request_id, event.attempt)
        if flight is None or event.leg not in flight.legs:
            return []
        return [*self._fail(flight, event), *self._pump(now_s)]

    def _cancelled(self, request_id: str, now_s: float) -> Commands:
        flight = self._flights.get(request_id)
        if flight is None:
            return []
        commands = self._abandon(flight)
        self._forget(flight)
        return [*commands, *self._pump(now_s)]

    def _worker_lost(self, worker_id: str, reason: str, now_s: float) -> Commands:
        commands: Commands = []
        for flight in list(self._flights.values()):
            lost = [leg for leg, worker in flight.legs.items() if worker == worker_id]
            booked = flight.plan is not None and flight.plan.decode_worker == worker_id
            if lost or (booked and not flight.waiting):
                leg = lost[0] if lost else m.Leg.DECODE
                event = m.LegFailed(
                    flight.request.request_id,
                    flight.attempt,
                    leg,
                    worker_id,
                    m.Failure.WORKER_LOST,
                    reason,
                )
                commands += self._fail(flight, event)
        self._ledger.workers.pop(worker_id, None)
        self._rates.forget(worker_id)
        return [*commands, *self._pump(now_s)]

    # --- ending and retrying --------------------------------------------------------------------

    def _fail(self, flight: Flight, event: m.LegFailed) -> Commands:
        """End this attempt; queue another one when that is allowed and can help."""
        broken = flight.streaming and event.leg is not m.Leg.PREFILL
        if flight.streaming and not broken:  # the KV is across; prefill no longer matters
            self._end_leg(flight, m.Leg.PREFILL)
            return []
        commands = self._abandon(flight, ended=event.leg)
        detail = f"{event.leg} on {event.worker_id}: {event.detail or event.failure}"
        if broken or event.final or flight.attempt >= self._limits.attempts:
            self._forget(flight)
            refusal = m.Refusal.BROKEN if broken else m.Refusal.FAILED
            request_id = flight.request.request_id
            return [*commands, m.Reject(request_id, refusal, detail, choice=_only(flight.plan))]
        flight.failed_workers = (*flight.failed_workers, event.worker_id)
        flight.handoff_failed |= event.failure is m.Failure.HANDOFF
        flight.plan = None
        self._queue.insert(0, flight)
        return commands

    def _abandon(self, flight: Flight, ended: m.Leg | None = None) -> Commands:
        """Cancel the running legs but `ended`, unbook all, release the hand-off."""
        request_id, attempt = flight.request.request_id, flight.attempt
        commands: Commands = [
            m.Cancel(request_id, attempt, worker)
            for leg, worker in flight.legs.items()
            if leg is not ended
        ]
        self._unbook(flight)
        return [*commands, *flight.take_release(consumed=False)]

    def _unbook(self, flight: Flight) -> None:
        if flight.plan is None:
            return
        for leg in m.Leg:
            key = (flight.request.request_id, flight.attempt, leg)
            for worker in (flight.plan.prefill_worker, flight.plan.decode_worker):
                self._ledger.unbook(worker, key)
        flight.legs.clear()

    def _end_leg(self, flight: Flight, leg: m.Leg) -> None:
        worker = flight.legs.pop(leg, None)
        if worker is not None:
            self._ledger.unbook(worker, (flight.request.request_id, flight.attempt, leg))

    def _forget(self, flight: Flight) -> None:
        self._unbook(flight)
        del self._flights[flight.request.request_id]
        if flight.waiting:
            self._queue.remove(flight)

    def _current(self, request_id: str, attempt: int) -> Flight | None:
        flight = self._flights.get(request_id)
        return flight if flight and flight.attempt == attempt and not flight.waiting else None

    # --- starting -------------------------------------------------------------------------------

    def _pump(self, now_s: float) -> Commands:
        """Start every queued request that has a plan; end those that waited too long or in vain."""
        if not self._queue:
            return []
        commands: Commands = []
        blocked: set[str] = set()
        for flight in list(self._queue):
            request = flight.request
            free = request.forced_plan is None and request.forced_worker is None
            if free and request.model in blocked and not self._overdue(flight, now_s):
                continue
            outcome = self._try_start(flight, now_s)
            if outcome:
                commands += outcome
            elif free:
                blocked.add(request.model)
        return [*commands, *self._wake()]

    def _overdue(self, flight: Flight, now_s: float) -> bool:
        return now_s >= flight.arrived_s + self._limits.max_wait_s

    def _try_start(self, flight: Flight, now_s: float) -> Commands:
        request = flight.request
        candidates = self._table.candidates(
            request, flight.failed_workers, whole_only=flight.handoff_failed
        )
        chosen = self._policy.choose(request, candidates, self._ledger)
        choice = m.Choice(candidates, chosen)
        if chosen is not None:
            return [self._start(flight, chosen, choice, now_s)]
        refusal = self._why_hopeless(flight, candidates, now_s)
        if refusal is None:
            return []
        self._forget(flight)
        retry_s = None if refusal[0] is m.Refusal.UNPLANNABLE else 1.0
        return [m.Reject(request.request_id, *refusal, retry_s, choice)]

    def _why_hopeless(
        self, flight: Flight, candidates: tuple[m.Candidate, ...], now_s: float
    ) -> tuple[m.Refusal, str] | None:
        model = flight.request.model
        if not candidates:
            if model in self._ledger.models_seen:
                return m.Refusal.NO_WORKER, f"no worker for model {model} is alive"
            return m.Refusal.UNKNOWN_MODEL, f"no worker serves model {model}"
        if all(c.why_not.startswith(("the request asked", "its role")) for c in candidates):
            forced = flight.request.forced_plan or flight.request.forced_worker
            return m.Refusal.UNPLANNABLE, f"no worker can serve this request as asked ({forced})"
        if self._overdue(flight, now_s):
            waited = f"waited {self._limits.max_wait_s:g} s for a worker"
            reasons = sorted({c.why_not for c in candidates})
            return m.Refusal.NO_WORKER, f"{waited}; {'; '.join(reasons[:4])}"
        return None

    def _start(
        self, flight: Flight, plan: m.Candidate, choice: m.Choice, now_s: float
    ) -> m.Command:
        request = flight.request
        self._queue.remove(flight)
        flight.attempt += 1
        flight.plan = plan
        flight.dispatched_s = now_s
        workers, attempt = self._ledger.workers, flight.attempt
        booking = Booking(request.prompt_tokens, kv_tokens(request))
        if plan.plan is m.PlanKind.AGGREGATED:
            flight.legs = {m.Leg.AGGREGATED: plan.decode_worker}
            key = (request.request_id, attempt, m.Leg.AGGREGATED)
            workers[plan.decode_worker].book(key, booking)
            return m.StartAggregated(request.request_id, attempt, plan.decode_worker, choice)
        flight.legs = {m.Leg.PREFILL: plan.prefill_worker}
        workers[plan.prefill_worker].book(
            (request.request_id, attempt, m.Leg.PREFILL),
            Booking(request.prompt_tokens, request.prompt_tokens),
        )
        workers[plan.decode_worker].book(
            (request.request_id, attempt, m.Leg.DECODE), Booking(0, booking.kv_tokens)
        )
        return m.StartPrefill(
            request.request_id, attempt, plan.prefill_worker, plan.decode_worker, choice
        )

    def _wake(self) -> Commands:
        if not self._queue:
            return []
        first_s = min(flight.arrived_s for flight in self._queue) + self._limits.max_wait_s
        if self._wake_s is not None and self._wake_s <= first_s:
            return []
        self._wake_s = first_s
        return [m.WakeAt(first_s)]


def _only(plan: m.Candidate | None) -> m.Choice:
    return m.Choice((plan,), plan) if plan is not None else m.Choice()
