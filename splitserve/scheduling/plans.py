"""Every way to serve a request, priced in predicted seconds, each with the reason against it."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from splitserve.messages import Candidate, GenerateRequest, PlanKind, Role
from splitserve.pairing import Pairs
from splitserve.performance.coefficients import area
from splitserve.scheduling.desk import Desk, kv_tokens
from splitserve.scheduling.ledger import WorkerAccount

# Which roles may run a request whole. A later tier is used only where the earlier ones name no
# worker at all, so a pool that is merely busy does not spill onto prefill workers.
_WHOLE_TIERS = (
    frozenset({Role.AGGREGATED, Role.AUTO}),
    frozenset({Role.AGGREGATED, Role.AUTO, Role.DECODE}),
    frozenset(Role),
)
_PREFILLS = frozenset({Role.PREFILL, Role.AUTO})
_DECODES = frozenset({Role.DECODE, Role.AUTO})


def untried(
    accounts: list[WorkerAccount], failed: tuple[str, ...], pairs: Pairs
) -> list[WorkerAccount]:
    """Return workers that have not failed a request, or all where those left cannot serve it."""
    if not failed:
        return accounts
    left = [a for a in accounts if a.worker_id not in failed]
    whole = any(not a.snapshot.splits_only for a in left)
    return left if whole or pairs.any(a.snapshot for a in left) else accounts


@dataclass(frozen=True, slots=True)
class PlanTable:
    """Prices plans against a desk's ledger and models; holds no state of its own."""

    desk: Desk

    def candidates(
        self,
        request: GenerateRequest,
        failed: tuple[str, ...] = (),
        *,
        whole_only: bool = False,
        nearest: int | None = None,
    ) -> tuple[Candidate, ...]:
        """Return every plan for `request`, feasible or not.

        `failed` workers are avoided where another can serve; `whole_only` gives up on splitting,
        which is how a request survives a hand-off that broke. Of whole plans, `nearest` leaves
        those on the workers with the fewest tokens to prefill.
        """
        accounts = self.desk.ledger.serving(request.model)
        alive = untried(accounts, failed, self.desk.ledger.pairs)
        if whole_only and nearest is not None and len(alive) > nearest:
            alive = heapq.nsmallest(nearest, alive, key=lambda a: a.pending_prefill_tokens)
        pairs: list[Candidate] = []
        if not whole_only and not request.unsplittable and len(alive) > 1:
            pairs = list(self._pairs(request, alive))
        whole = self._whole(request, alive, any_pair=any(self._structural(c) for c in pairs))
        return (*whole, *pairs)

    @staticmethod
    def _structural(candidate: Candidate) -> bool:
        return not candidate.why_not or candidate.why_not.startswith(("full", "no KV room"))

    def _whole(
        self, request: GenerateRequest, alive: list[WorkerAccount], *, any_pair: bool
    ) -> Iterator[Candidate]:
        forced = request.forced_plan is PlanKind.AGGREGATED
        tiers = _WHOLE_TIERS[:1] if any_pair and not forced else _WHOLE_TIERS
        usable = [a for a in alive if not (a.snapshot.draining or a.snapshot.splits_only)]
        allowed = tiers[-1]
        for tier in tiers:
            if any(a.snapshot.role in tier for a in usable):
                allowed = tier
                break
        for account in alive:
            yield self._price_whole(request, account, allowed)

    def _price_whole(
        self, request: GenerateRequest, account: WorkerAccount, allowed: frozenset[Role]
    ) -> Candidate:
        worker = account.snapshot
        why_not = self._refusal(request, PlanKind.AGGREGATED, (worker.worker_id,))
        if not why_not and worker.draining:
            why_not = "draining"
        if not why_not and worker.splits_only:
            why_not = "its engine serves nothing whole"
        if not why_not and worker.role not in allowed:
            why_not = f"its role is {worker.role}"
        return Candidate(
            plan=PlanKind.AGGREGATED,
            prefill_worker=worker.worker_id,
            decode_worker=worker.worker_id,
            predicted_ttft_s=self.prefill_s(account, request),
            predicted_tpot_s=self.decode_step_s(account, request),
            why_not=why_not or account.why_full(kv_tokens(request)),
        )

    def prefill_s(self, account: WorkerAccount, request: GenerateRequest) -> float:
        """F: this prompt behind all that is pending on the worker, without margin."""
        fresh = self.desk.uncached(account, request)
        return account.model.prefill_s(
            account.pending_prefill_tokens + fresh,
            account.pending_area + area(fresh, request.prompt_tokens - fresh),
            account.streams_soon,
            account.kv_soon_tokens,
        )

    @staticmethod
    def decode_step_s(account: WorkerAccount, request: GenerateRequest) -> float:
        """D': a step once this request decodes here too."""
        return account.model.decode_step_s(
            account.streams_soon + 1, account.kv_soon_tokens + request.prompt_tokens
        )

    def _pairs(self, request: GenerateRequest, alive: list[WorkerAccount]) -> Iterator[Candidate]:
        decodes = [a for a in alive if a.snapshot.role in _DECODES]
        for prefill in alive:
            if prefill.snapshot.role not in _PREFILLS:
                continue
            for decode in decodes:
                if decode is not prefill:
                    yield self.price_pair(request, prefill, decode)

    def price_pair(
        self, request: GenerateRequest, prefill: WorkerAccount, decode: WorkerAccount
    ) -> Candidate:
        p, d = prefill.snapshot, decode.snapshot
        why_not = self._refusal(request, PlanKind.DISAGGREGATED, (p.worker_id, d.worker_id))
        if not why_not and (p.draining or d.draining):
            why_not = "draining"
        why_not = why_not or self.desk.ledger.pairs.why_not(p, d)
        why_not = why_not or prefill.why_full(request.prompt_tokens)
        why_not = why_not or decode.why_full(kv_tokens(request))
        moved_bytes = self.desk.moved_bytes(prefill, decode, request)
        transfer_s = self.desk.links.transfer_s(p.worker_id, d.worker_id, moved_bytes)
        step_s = self.decode_step_s(decode, request)
        join_s = 0.0 if p.hands_over_logits else step_s
        return Candidate(
            plan=PlanKind.DISAGGREGATED,
            prefill_worker=p.worker_id,
            decode_worker=d.worker_id,
            predicted_ttft_s=self.prefill_s(prefill, request) + transfer_s + join_s,
            predicted_tpot_s=step_s,
            transfer_s=transfer_s,
            why_not=why_not,
        )

    @staticmethod
    def _refusal(request: GenerateRequest, plan: PlanKind, workers: tuple[str, ...]) -> str:
        if request.forced_plan is not None and request.forced_plan is not plan:
            return f"the request asked for {request.forced_plan}"
        if request.forced_worker is not None and request.forced_worker not in workers:
            return f"the request asked for worker {request.forced_worker}"
        return ""
