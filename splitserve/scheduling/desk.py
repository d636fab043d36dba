"""What a policy works with: the state of the fleet, the waiting requests, and four things to do.

Start a request, decline it, recall a running one, be woken later. Each takes effect at once, so a
policy that starts two requests sees the first one's load when it looks at the second.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from splitserve import messages as m
from splitserve.performance.lengths import Lengths, PromptScale
from splitserve.performance.links import Links
from splitserve.prefix.index import PrefixIndex
from splitserve.scheduling.flight import Flight, is_batch
from splitserve.scheduling.ledger import Booking, Ledger, Phase, WorkerAccount

DEFAULT_OUTPUT_TOKENS = 256  # booked for a request that names no limit, until lengths are known


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds on what the scheduler holds and how often it tries."""

    queue: int = 4096
    attempts: int = 3
    max_wait_s: float = 60.0


def kv_tokens(request: m.GenerateRequest) -> int:
    """Tokens of KV the request will hold at its end, as far as one can know before it ran."""
    wanted = DEFAULT_OUTPUT_TOKENS if request.max_tokens is None else request.max_tokens
    return request.prompt_tokens + min(wanted, 4 * DEFAULT_OUTPUT_TOKENS)


@dataclass(slots=True)
class Desk:
    """State of one scheduler. Policies read all of it and act through the methods only."""

    limits: SchedulerLimits = SchedulerLimits()
    ledger: Ledger = field(default_factory=Ledger)
    links: Links = field(default_factory=Links)
    lengths: Lengths = field(default_factory=Lengths)
    prompts: PromptScale = field(default_factory=PromptScale)
    prefix: PrefixIndex = field(default_factory=PrefixIndex)
    flights: dict[str, Flight] = field(default_factory=dict)
    waiting: dict[str, Flight] = field(default_factory=dict)
    commands: list[m.Command] = field(default_factory=list)
    returned: list[Flight] = field(default_factory=list)
    ended: list[Flight] = field(default_factory=list)  # of those that were ever started
    unstreamed: list[tuple[float, str, tuple[str, int, m.Leg]]] = field(default_factory=list)
    _wake_s: float | None = None

    # --- what a policy may do -------------------------------------------------------------------

    def start(self, flight: Flight, plan: m.Candidate, choice: m.Choice, now_s: float) -> None:
        """Send a waiting request where `plan` says."""
        request = flight.request
        del self.waiting[request.request_id]
        flight.attempt += 1
        flight.plan = plan
        flight.dispatched_s = now_s
        flight.prefilled_s = None
        flight.used_prompt_tokens = request.prompt_tokens
        if plan.plan is m.PlanKind.AGGREGATED:
            self._start_whole(flight, plan, choice, now_s)
        else:
            self._start_split(flight, plan, choice, now_s)

    def decline(
        self,
        flight: Flight,
        refusal: m.Refusal,
        detail: str,
        retry_after_s: float | None,
        choice: m.Choice,
    ) -> None:
        """End a waiting request without an answer."""
        self.forget(flight)
        request_id = flight.request.request_id
        self.commands.append(m.Reject(request_id, refusal, detail, retry_after_s, choice))

    def recall(self, flight: Flight) -> None:
        """Take a running request that has sent nothing back into the queue."""
        assert not flight.streaming, "what has gone out cannot be recalled"
        self.commands += self.abandon(flight)
        self.requeue(flight)

    def wake_at(self, at_s: float) -> None:
        """Ask for a `TimerFired` at `at_s`, unless an earlier one is due anyway."""
        if self._wake_s is None or at_s < self._wake_s:
            self._wake_s = at_s
            self.commands.append(m.WakeAt(at_s))

    def assume_first_tokens(self, now_s: float) -> None:
        """An answer that is not streamed shows no first token: take the predicted one for it."""
        while self.unstreamed and self.unstreamed[0][0] <= now_s:
            due_s, worker_id, key = heapq.heappop(self.unstreamed)
            account = self.ledger.workers.get(worker_id)
            if account is not None:
                account.first_token(key, due_s)

    # --- what the scheduler does ----------------------------------------------------------------

    def woken(self) -> None:
        """The timer has fired."""
        self._wake_s = None

    def runs_whole(self, request: m.GenerateRequest) -> bool:
        """True when some worker of the model can answer without a hand-off."""
        return any(not a.snapshot.splits_only for a in self.ledger.serving(request.model))

    def lose_prefixes(self, before: m.WorkerSnapshot, now: m.WorkerSnapshot) -> None:
        """Take out of the prefix index what a worker says its cache has let go."""
        if now.cache_cleared != before.cache_cleared:
            self.prefix.forget(now.worker_id)
            return
        blocks = now.cache_removed_tokens // 512 - before.cache_removed_tokens // 512
        self.prefix.remove_oldest(now.worker_id, max(0, blocks))

    def uncached(self, account: WorkerAccount, request: m.GenerateRequest) -> int:
        """U: prompt tokens that this worker would have to compute; at least one."""
        if not request.block_hashes:
            return request.prompt_tokens
        blocks = self.prefix.match(account.worker_id, request.block_hashes)
        return max(1, request.prompt_tokens - blocks * request.hash_block_tokens)

    def _booking(
        self, account: WorkerAccount, request: m.GenerateRequest, phase: Phase, now_s: float
    ) -> Booking:
        fresh = self.uncached(account, request)
        if phase is Phase.TRANSFER:
            fresh = 0
        held = request.prompt_tokens - fresh
        return Booking(
            request, phase, fresh, held, kv_tokens(request), now_s, batch=is_batch(request)
        )

    def _start_whole(
        self, flight: Flight, plan: m.Candidate, choice: m.Choice, now_s: float
    ) -> None:
        request, attempt = flight.request, flight.attempt
        account = self.ledger.workers[plan.decode_worker]
        flight.legs = {m.Leg.AGGREGATED: plan.decode_worker}
        key = (request.request_id, attempt, m.Leg.AGGREGATED)
        account.book(key, self._booking(account, request, Phase.PENDING, now_s))
        if not request.streamed:
            due_s = now_s + plan.predicted_ttft_s
            heapq.heappush(self.unstreamed, (due_s, plan.decode_worker, key))
        self.prefix.add(plan.decode_worker, request.block_hashes)
        self.commands.append(
            m.StartAggregated(request.request_id, attempt, plan.decode_worker, choice)
        )

    def _start_split(
        self, flight: Flight, plan: m.Candidate, choice: m.Choice, now_s: float
    ) -> None:
        request, attempt = flight.request, flight.attempt
        prefill = self.ledger.workers[plan.prefill_worker]
        decode = self.ledger.workers[plan.decode_worker]
        flight.legs = {m.Leg.PREFILL: plan.prefill_worker}
        booking = self._booking(prefill, request, Phase.PENDING, now_s)
        booking.kv_tokens, booking.decodes_here = request.prompt_tokens, False
        prefill.book((request.request_id, attempt, m.Leg.PREFILL), booking)
        decode.book(
            (request.request_id, attempt, m.Leg.DECODE),
            self._booking(decode, request, Phase.TRANSFER, now_s),
        )
        flight.moving_bytes = self.moved_bytes(prefill, decode, request)
        self.links.begin(plan.prefill_worker, plan.decode_worker, flight.moving_bytes)
        self.prefix.add(plan.prefill_worker, request.block_hashes)
        self.prefix.add(plan.decode_worker, request.block_hashes)
        self.commands.append(
            m.StartPrefill(
                request.request_id, attempt, plan.prefill_worker, plan.decode_worker, choice
            )
        )

    def moved_bytes(
        self, prefill: WorkerAccount, decode: WorkerAccount, request: m.GenerateRequest
    ) -> float:
        """Bytes a hand-off moves: what the decode worker does not have already."""
        fresh = self.uncached(decode, request)
        return float(fresh * prefill.snapshot.kv_bytes_per_token)

    def abandon(self, flight: Flight, ended: m.Leg | None = None) -> list[m.Command]:
        """Cancel the running legs but `ended`, unbook all, release the hand-off."""
        request_id, attempt = flight.request.request_id, flight.attempt
        commands: list[m.Command] = [
            m.Cancel(request_id, attempt, worker)
            for leg, worker in flight.legs.items()
            if leg is not ended
        ]
        self.unbook(flight)
        return [*commands, *flight.take_release(consumed=False)]

    def requeue(self, flight: Flight) -> None:
        """Put a flight whose legs have ended back among the waiting."""
        flight.plan = None
        self.waiting[flight.request.request_id] = flight
        self.returned.append(flight)

    def unbook(self, flight: Flight) -> None:
        """Take back everything booked for a flight."""
        if flight.plan is None:
            return
        plan = flight.plan
        for leg in m.Leg:
            key = (flight.request.request_id, flight.attempt, leg)
            for worker in (plan.prefill_worker, plan.decode_worker):
                self.ledger.unbook(worker, key)
        flight.legs.clear()
        self.arrived_at_decode(flight)

    def arrived_at_decode(self, flight: Flight) -> None:
        """Its KV is across, or will not come: the link is free of it."""
        if flight.moving_bytes and flight.plan is not None:
            plan = flight.plan
            self.links.end(plan.prefill_worker, plan.decode_worker, flight.moving_bytes)
        flight.moving_bytes = 0.0

    def end_leg(self, flight: Flight, leg: m.Leg) -> Booking | None:
        """One leg is over; the others run on."""
        worker = flight.legs.pop(leg, None)
        if worker is None:
            return None
        return self.ledger.unbook(worker, (flight.request.request_id, flight.attempt, leg))

    def forget(self, flight: Flight) -> None:
        """The request has ended."""
        self.unbook(flight)
        if flight.attempt:
            self.ended.append(flight)
        del self.flights[flight.request.request_id]
        self.waiting.pop(flight.request.request_id, None)
