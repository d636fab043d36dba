"""SLACK: release a request when it can meet its target and nobody else loses theirs by it.

Three bands. Interactive requests wait in order of deadline and are released as soon as a plan
passes the guards. One whose target cannot be met any more is relegated: it is served, but after
those that still can be. Batch fills what is left, one bounded piece per worker at a time, so an
interactive arrival never waits behind more than that piece. See docs/SCHEDULING.md.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from splitserve import messages as m
from splitserve.scheduling.desk import Desk
from splitserve.scheduling.fairness import Fairness, TenantQueues
from splitserve.scheduling.flight import Flight, deadline_of
from splitserve.scheduling.guards import Guards, GuardSettings
from splitserve.scheduling.ledger import Phase, WorkerAccount
from splitserve.scheduling.policies.pricing import Pricing

_NEVER_S = float("inf")


@dataclass(frozen=True, slots=True)
class SlackSettings:
    """Constants of the policy. Times in seconds, sizes in tokens."""

    scan_heads: int = 32
    local_tokens: int = 1024  # an uncached prompt this short is not worth a hand-off
    least_remote_tokens: int = 256
    batch_floor_tpot_s: float = 0.05
    relegate: bool = True
    recall_batch: bool = True
    guards: GuardSettings = field(default_factory=GuardSettings)


@dataclass(order=True, slots=True)
class _Head:
    """A waiting interactive request, ordered by deadline."""

    deadline_s: float
    request_id: str
    flight: Flight = field(compare=False)
    seen: int = field(default=-1, compare=False)  # the tick at which no worker could take it
    fleet: int = field(default=-1, compare=False)  # workers there were when the next two were taken
    own_s: float = field(default=0.0, compare=False)  # the step it asks for
    idle_s: float = field(default=0.0, compare=False)  # its TTFT on the best idle worker


class Slack:
    """The policy. State: who waits in which band; everything else is read from the desk."""

    def __init__(self, settings: SlackSettings | None = None) -> None:
        self.settings = settings or SlackSettings()
        self._interactive: list[_Head] = []
        self._fairness = Fairness()
        self._relegated = TenantQueues(self._fairness)
        self._batch = TenantQueues(self._fairness)
        self._pricing: Pricing | None = None

    # --- the queue ------------------------------------------------------------------------------

    def arrived(self, flight: Flight, desk: Desk, now_s: float) -> None:
        """Sort a request into its band; one that comes back after a failure goes first."""
        self._fairness.arrived(flight.request, now_s)
        if flight.batch:
            self._batch.add(flight, first=flight.attempt > 0)
            return
        insort(self._interactive, _Head(deadline_of(flight), flight.request.request_id, flight))

    def left(self, flight: Flight) -> None:
        """A waiting request was cancelled."""
        self._interactive = [h for h in self._interactive if h.flight is not flight]
        self._relegated.take(flight)
        self._batch.take(flight)

    def ended(self, flight: Flight, prompt_tokens: int, output_tokens: int) -> None:
        """A request is over: its tenant is charged what it used."""
        self._fairness.settle(flight, prompt_tokens, output_tokens)

    def pump(self, desk: Desk, now_s: float) -> None:
        """Release what can be released."""
        if not desk.waiting:
            return
        pricing = self._pricing
        if pricing is None or pricing.desk is not desk:
            guards = Guards(desk.lengths, self.settings.guards)
            pricing = self._pricing = Pricing(desk, guards, self.settings)
        pricing.begin(now_s)
        while self._release_interactive(pricing):
            pass
        while self._release_relegated(pricing):
            pass
        if not self._interactive:
            while self._release_batch(pricing):
                pass
        self._set_timer(desk, now_s)

    # --- interactive ----------------------------------------------------------------------------

    def _release_interactive(self, pricing: Pricing) -> bool:
        """One pass over the first heads; True when it started or moved something.

        A start only makes a worker busier, so heads that were refused before it in this pass stay
        refused. Work that was taken back frees one, and among several tenants the turn changes:
        then the pass begins anew.
        """
        now_s, moved = pricing.now_s, False
        for head in self._fairness.order(self._interactive, now_s, self.settings.scan_heads):
            if pricing.changed_since(head.seen) and self._try(head, pricing):
                moved = True
                if head.flight.waiting or self._fairness.several:
                    return True
            elif head.idle_s + now_s > head.deadline_s:
                self._interactive.remove(head)
                self._give_up(head.flight, pricing)
                moved = True
        return moved

    def _try(self, head: _Head, pricing: Pricing) -> bool:
        """Try a head on what has changed since it was tried last; True when something moved.

        A worker that could not take it and has not changed cannot take it now: time only makes a
        deadline nearer.
        """
        flight = head.flight
        fleet = len(pricing.desk.ledger.workers)
        renewed = head.fleet != fleet
        if renewed:
            head.fleet = fleet
            head.own_s = pricing.own_step_s(flight, head.deadline_s)
        plan = pricing.choose(flight, head.deadline_s, head.seen, head.own_s)
        if plan is not None:
            self._interactive.remove(head)
            self._start(flight, plan, pricing)
            return True
        if pricing.decline_if_unservable(flight):
            self._interactive.remove(head)
            return True
        if renewed:
            head.idle_s = pricing.best_idle_s(flight)
        if self.settings.recall_batch and self._recall_batch(flight, pricing):
            return True
        head.seen = pricing.tick
        return False

    def _give_up(self, flight: Flight, pricing: Pricing) -> None:
        """The target cannot be met: refuse at once, or serve it behind those that still can."""
        if flight.request.fail_fast:
            pricing.refuse_hopeless(flight, len(self._interactive))
        elif self.settings.relegate:
            self._relegated.add(flight)
        else:
            insort(self._interactive, _Head(_NEVER_S, flight.request.request_id, flight))

    def _recall_batch(self, flight: Flight, pricing: Pricing) -> bool:
        """Where batch work alone is in the way, take its newest item back."""
        for account in pricing.with_batch(flight.request):
            victim = self._newest_batch(account, pricing.desk)
            if victim is None or not pricing.batch_is_in_the_way(account, flight):
                continue
            pricing.desk.recall(victim)
            return True
        return False

    @staticmethod
    def _newest_batch(account: WorkerAccount, desk: Desk) -> Flight | None:
        for (request_id, _, _), booking in reversed(account.bookings.items()):
            if booking.batch and booking.phase is not Phase.DECODING:
                return desk.flights.get(request_id)
        return None

    # --- the other bands ------------------------------------------------------------------------

    def _release_relegated(self, pricing: Pricing) -> bool:
        flight = self._relegated.first()
        if flight is None:
            return False
        plan = pricing.choose(flight, _NEVER_S)
        if plan is None:
            if not pricing.decline_if_unservable(flight):
                return False
        else:
            self._start(flight, plan, pricing)
        self._relegated.take(flight)
        return True

    def _release_batch(self, pricing: Pricing) -> bool:
        flight = self._batch.first()
        if flight is None:
            return False
        plan = pricing.choose_batch(flight)
        if plan is None:
            if not pricing.decline_if_unservable(flight):
                return False
        else:
            self._start(flight, plan, pricing)
        self._batch.take(flight)
        return True

    def _start(self, flight: Flight, plan: m.Candidate, pricing: Pricing) -> None:
        choice = pricing.explain(flight, plan)
        self._fairness.served(flight.request, choice.chosen or plan)
        pricing.desk.start(flight, plan, choice, pricing.now_s)

    def _set_timer(self, desk: Desk, now_s: float) -> None:
        """Wake when the first waiting request would become hopeless, or overdue."""
        due_s = self._relegated.oldest_s() + desk.limits.max_wait_s
        if self._interactive:
            due_s = min(due_s, self._interactive[0].deadline_s)
        if due_s < _NEVER_S:
            desk.wake_at(max(now_s + 0.001, due_s))
