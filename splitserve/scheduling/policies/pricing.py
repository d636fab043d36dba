"""What SLACK computes of plans: prices, guards, the choice, and the explanation afterwards."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from splitserve import messages as m
from splitserve.performance.coefficients import area
from splitserve.scheduling.desk import Desk
from splitserve.scheduling.flight import Flight, deadline_of
from splitserve.scheduling.guards import HEADROOM, OWN_STEP, Guards
from splitserve.scheduling.ledger import WorkerAccount
from splitserve.scheduling.plans import PlanTable
from splitserve.scheduling.policies.eligible import Eligible
from splitserve.scheduling.policies.immediate import decline_if_hopeless, retry_after_s
from splitserve.scheduling.policies.refusals import Refusals

if TYPE_CHECKING:
    from splitserve.scheduling.policies.slack import SlackSettings

_FEW = 8  # workers; among more the pairs are too many to explain them all
_SHOWN = 31  # candidates beside the chosen one; of a larger fleet, those with the least to prefill
_DECODE_AHEAD = 10  # steps of decode speed that count beside one first token
_MIXED = frozenset({m.Role.AGGREGATED, m.Role.AUTO})


class Pricing:
    """Prices plans of one scheduler at one instant (`begin`)."""

    def __init__(self, desk: Desk, guards: Guards, settings: SlackSettings) -> None:
        self.desk = desk
        self.now_s = 0.0
        self._guards = guards
        self._settings = settings
        self._table = PlanTable(desk)
        self.eligible = Eligible(desk)
        self._refusals = Refusals()
        self._changed_key = (-1, -1)
        self._changed_of: list[WorkerAccount] = []
        self._changed_since: list[WorkerAccount] = []
        self._batch_key = ("", -1)
        self._with_batch: list[WorkerAccount] = []

    def begin(self, now_s: float) -> None:
        """Everything is priced as of now."""
        self.now_s = now_s
        self.eligible.begin()
        self._changed_key, self._batch_key = (-1, -1), ("", -1)

    @property
    def tick(self) -> int:
        """The instant of now, in changes of the ledger."""
        return self.desk.ledger.ticks.value

    def changed_since(self, tick: int) -> bool:
        """True when any worker has changed after `tick`, or none is there."""
        return self.tick > tick or not self.desk.ledger.workers

    # --- interactive ----------------------------------------------------------------------------

    def choose(
        self, flight: Flight, deadline_s: float, since: int = -1, own_s: float | None = None
    ) -> m.Candidate | None:
        """Return the best plan that passes every guard, or None.

        `own_s` is what `own_step_s` said of this request before.

        Only plans with a worker that has changed after tick `since` are looked at.
        """
        local, local_p = self._best_local(flight, deadline_s, since, own_s)
        if local is not None and local[1] <= self._settings.local_tokens:
            return local[0]
        remote = self._best_remote(flight, deadline_s, since)
        if remote is None:
            return (local or local_p or (None, 0))[0]
        if local is None:
            return remote
        return min(local[0], remote, key=lambda plan: plan.predicted_ttft_s)

    def _best_local(
        self, flight: Flight, deadline_s: float, since: int, own_s: float | None
    ) -> tuple[tuple[m.Candidate, int] | None, tuple[m.Candidate, int] | None]:
        """Best whole plan on workers that decode, and on those meant for prefill."""
        best: tuple[m.Candidate, int] | None = None
        best_p: tuple[m.Candidate, int] | None = None
        score, score_p = math.inf, math.inf
        candidates = self.eligible.whole(flight)
        changed = self._changed(candidates, since)
        if not changed:
            return None, None
        if own_s is None:
            own_s = self._own_step_s(flight.request, candidates, deadline_s)
        for account in changed:
            found = self._local(flight, account, deadline_s, own_s)
            if found is None:
                continue
            fresh = found[1]
            cost = (account.pending_prefill_tokens + fresh) * (account.in_flight + 1)
            if account.snapshot.role is m.Role.PREFILL:
                if cost < score_p:
                    best_p, score_p = found, cost
            elif cost < score:
                best, score = found, cost
        return best, best_p

    def _changed(self, candidates: list[WorkerAccount], since: int) -> list[WorkerAccount]:
        """Those that have changed after tick `since`; heads tried together ask the same."""
        if since < 0:
            return candidates
        key = (since, self.tick)
        if key != self._changed_key or candidates is not self._changed_of:
            self._changed_key, self._changed_of = key, candidates
            self._changed_since = [a for a in candidates if a.version > since]
        return self._changed_since

    def with_batch(self, request: m.GenerateRequest) -> list[WorkerAccount]:
        """Usable workers that hold batch work which could be taken back."""
        key = (request.model, self.tick)
        if key != self._batch_key:
            self._batch_key = key
            usable = self.eligible.usable(request)
            self._with_batch = [a for a in usable if a.batch_pending or a.batch_kv_tokens]
        return self._with_batch

    def _local(
        self, flight: Flight, account: WorkerAccount, deadline_s: float, own_s: float
    ) -> tuple[m.Candidate, int] | None:
        request, model = flight.request, account.model
        fresh = self.desk.uncached(account, request)
        if self._refusals.cover(account, fresh, request.prompt_tokens):
            return None
        why_not = self._guards.why_decode_breaks(
            account, request, batch=False, floor_s=own_s, now_s=self.now_s
        )
        if why_not:
            if why_not != OWN_STEP:
                self._refusals.note(account, fresh, request.prompt_tokens)
            return None
        fresh_area = area(fresh, request.prompt_tokens - fresh)
        ttft_s = model.prefill_s(
            account.pending_prefill_tokens + fresh,
            account.pending_area + fresh_area,
            account.streams_soon,
            account.kv_soon_tokens,
        )
        step_s = self._table.decode_step_s(account, request)
        end_s = self.now_s + model.margin * ttft_s + self._tail_s(request, step_s)
        if end_s > deadline_s:
            return None
        if self._guards.why_prefill_breaks(
            account, fresh, fresh_area, request.prompt_tokens, self.now_s
        ):
            self._refusals.note(account, fresh, request.prompt_tokens)
            return None
        worker = account.worker_id
        return m.Candidate(m.PlanKind.AGGREGATED, worker, worker, ttft_s, step_s), fresh

    def _tail_s(self, request: m.GenerateRequest, step_s: float) -> float:
        """For an end-to-end class the answer must be complete, not begun."""
        if request.slo.ttft_s is not None or request.slo.deadline_s is None:
            return 0.0
        return self.desk.lengths.left(request, 0.8, 0) * step_s

    def _best_remote(self, flight: Flight, deadline_s: float, since: int) -> m.Candidate | None:
        request = flight.request
        if request.unsplittable or flight.handoff_failed:
            return None
        if request.forced_plan is m.PlanKind.AGGREGATED:
            return None
        best: m.Candidate | None = None
        if not self.eligible.moves_kv(request.model):
            return None
        accounts = [a for a in self.eligible.alive(flight) if a.snapshot.connector]
        if len(accounts) < 2 or all(a.version <= since for a in accounts):
            return None
        decodes = [a for a in accounts if a.snapshot.role is not m.Role.PREFILL]
        floor_s = self._settings.batch_floor_tpot_s
        if not flight.batch:
            floor_s = self._own_step_s(request, decodes, deadline_s)
        decodes = [a for a in decodes if not self._why_not_decode(a, flight, floor_s)]
        for prefill in accounts:
            if prefill.snapshot.role is m.Role.DECODE or (flight.batch and prefill.batch_pending):
                continue
            for decode in decodes:
                if prefill.version <= since and decode.version <= since:
                    continue
                found = self._remote(flight, prefill, decode, deadline_s)
                if found is not None and (best is None or _cost(found) < _cost(best)):
                    best = found
        return best

    def _why_not_decode(self, account: WorkerAccount, flight: Flight, floor_s: float) -> str:
        if account.in_flight >= account.snapshot.max_running:
            return "full"
        return self._guards.why_decode_breaks(
            account, flight.request, batch=flight.batch, floor_s=floor_s, now_s=self.now_s
        )

    def own_step_s(self, flight: Flight, deadline_s: float) -> float:
        """The step a request asks for of those that could run it whole."""
        return self._own_step_s(flight.request, self.eligible.whole(flight), deadline_s)

    @staticmethod
    def _own_step_s(
        request: m.GenerateRequest, decodes: list[WorkerAccount], deadline_s: float
    ) -> float:
        """The step a request asks for of those that could decode it.

        None where not one of them could give it even alone, nor for a request that is late
        already (`deadline_s` infinite): a slow box still serves.
        """
        target_s = request.slo.tpot_s
        if target_s is None or deadline_s == math.inf or not decodes:
            return math.inf
        tokens = request.prompt_tokens
        best_s = min(account.model.decode_step_s(1, tokens) for account in decodes)
        return target_s if HEADROOM * best_s <= target_s else math.inf

    def _remote(
        self, flight: Flight, prefill: WorkerAccount, decode: WorkerAccount, deadline_s: float
    ) -> m.Candidate | None:
        request = flight.request
        if prefill is decode or prefill.in_flight >= prefill.snapshot.max_running:
            return None
        if request.forced_worker not in (None, prefill.worker_id, decode.worker_id):
            return None
        if self.desk.ledger.pairs.why_not(prefill.snapshot, decode.snapshot):
            return None
        measured = self.desk.links.measured(prefill.worker_id, decode.worker_id)
        if not measured and not self._must_probe(prefill, decode, request):
            return None
        fresh = self.desk.uncached(prefill, request)
        short = fresh <= self._settings.least_remote_tokens and request.forced_plan is None
        if short and prefill.snapshot.role in _MIXED:
            return None
        # The guards know memory better than the booking that the table goes by.
        candidate = replace(self._table.price_pair(request, prefill, decode), why_not="")
        late_s = (prefill.model.margin - 1) * self._table.prefill_s(prefill, request)
        tail_s = self._tail_s(request, candidate.predicted_tpot_s)
        if self.now_s + candidate.predicted_ttft_s + late_s + tail_s > deadline_s:
            return None
        if self._guards.why_prefill_breaks(
            prefill,
            fresh,
            area(fresh, request.prompt_tokens - fresh),
            request.prompt_tokens,
            self.now_s,
        ):
            return None
        return candidate

    def _must_probe(
        self, prefill: WorkerAccount, decode: WorkerAccount, request: m.GenerateRequest
    ) -> bool:
        """An unmeasured link is tried where roles leave no other way, one request at a time."""
        split_roles = (
            prefill.snapshot.role is m.Role.PREFILL and decode.snapshot.role is m.Role.DECODE
        )
        return request.forced_plan is m.PlanKind.DISAGGREGATED or split_roles

    # --- batch ----------------------------------------------------------------------------------

    def choose_batch(self, flight: Flight) -> m.Candidate | None:
        """Return a plan on the least loaded worker that may take a batch piece now.

        Where roles were declared, batch is split like everything else.
        """
        request = flight.request
        best: WorkerAccount | None = None
        best_cost = (True, math.inf)
        for account in self.eligible.whole(flight):
            if account.batch_pending or self._why_not_batch(account, request):
                continue
            cost = (
                account.snapshot.role is not m.Role.PREFILL,
                account.pending_prefill_tokens
                + self.desk.uncached(account, request)
                + account.streams_soon,
            )
            if best is None or cost < best_cost:
                best, best_cost = account, cost
        if best is None:
            return self._best_remote(flight, math.inf, -1)
        step_s = self._table.decode_step_s(best, request)
        ttft_s = self._table.prefill_s(best, request)
        worker = best.worker_id
        return m.Candidate(m.PlanKind.AGGREGATED, worker, worker, ttft_s, step_s)

    def _why_not_batch(self, account: WorkerAccount, request: m.GenerateRequest) -> str:
        why = self._guards.why_decode_breaks(
            account,
            request,
            batch=True,
            floor_s=self._settings.batch_floor_tpot_s,
            now_s=self.now_s,
        )
        if why:
            return why
        fresh = self.desk.uncached(account, request)
        return self._guards.why_prefill_breaks(
            account,
            fresh,
            area(fresh, request.prompt_tokens - fresh),
            request.prompt_tokens,
            self.now_s,
        )

    def batch_is_in_the_way(self, account: WorkerAccount, flight: Flight) -> bool:
        """True when without batch's pending prefill the worker would meet this deadline."""
        request = flight.request
        fresh = self.desk.uncached(account, request)
        alone_s = account.model.prefill_s(
            fresh,
            area(fresh, request.prompt_tokens - fresh),
            account.streams,
            account.kv_soon_tokens,
        )
        return self.now_s + account.model.margin * alone_s <= deadline_of(flight)

    # --- giving up, explaining ------------------------------------------------------------------

    def best_idle_s(self, flight: Flight) -> float:
        """TTFT on the best worker if it were idle; infinite when there is none."""
        request = flight.request
        best_s = math.inf
        for account in self.eligible.usable(request):
            fresh = self.desk.uncached(account, request)
            alone_s = account.model.prefill_s(
                fresh, area(fresh, request.prompt_tokens - fresh), 0, 0
            )
            best_s = min(best_s, alone_s)
        return best_s

    def refuse_hopeless(self, flight: Flight, ahead: int) -> None:
        """429 with the predicted wait."""
        request = flight.request
        accounts = list(self.eligible.usable(request))
        wait_s = min(self._table.prefill_s(account, request) for account in accounts)
        wait_s += ahead * self.best_idle_s(flight) / len(accounts)
        retry_s = retry_after_s(request.request_id, wait_s)
        detail = f"the first token would take about {wait_s:.1f} s, over its target"
        choice = m.Choice(self._table.candidates(request))
        self.desk.decline(flight, m.Refusal.HOPELESS, detail, retry_s, choice)

    def decline_if_unservable(self, flight: Flight) -> bool:
        """End a request that no worker can serve at all, or that waited too long."""
        request = flight.request
        overdue = self.now_s >= flight.arrived_s + self.desk.limits.max_wait_s
        usable = bool(self.eligible.usable(request))
        free = not (request.forced_plan or request.unsplittable) and request.forced_worker is None
        if usable and ((free and not overdue) or (flight.batch and overdue)):
            return False  # batch waits as long as it has to
        candidates = self._table.candidates(flight.request, flight.failed_workers)
        return decline_if_hopeless(flight, self.desk, m.Choice(candidates), self.now_s)

    def explain(self, flight: Flight, plan: m.Candidate) -> m.Choice:
        """Return the candidates with their prices and the reasons against them."""
        request = flight.request
        fleet = len(self.eligible.usable(request))
        shown = [
            c
            for c in self._table.candidates(
                request,
                flight.failed_workers,
                whole_only=plan.plan is m.PlanKind.AGGREGATED and fleet > _FEW,
                nearest=_SHOWN,
            )
            if (c.plan, c.prefill_worker, c.decode_worker)
            != (plan.plan, plan.prefill_worker, plan.decode_worker)
        ]
        return m.Choice((plan, *shown), plan)


def _cost(candidate: m.Candidate) -> float:
    return candidate.predicted_ttft_s + _DECODE_AHEAD * candidate.predicted_tpot_s
