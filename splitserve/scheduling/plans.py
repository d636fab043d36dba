"""Every way to serve a request, priced in predicted seconds, each with the reason against it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from splitserve.messages import Candidate, GenerateRequest, PlanKind, Role
from splitserve.pairing import why_not_pair
from splitserve.performance.rates import Rates
from splitserve.scheduling.ledger import Ledger, WorkerAccount

DEFAULT_OUTPUT_TOKENS = 256  # booked for a request that names no limit

# Which roles may run a request whole. A later tier is used only where the earlier ones name no
# worker at all, so a pool that is merely busy does not spill onto prefill workers.
_WHOLE_TIERS = (
    frozenset({Role.AGGREGATED, Role.AUTO}),
    frozenset({Role.AGGREGATED, Role.AUTO, Role.DECODE}),
    frozenset(Role),
)
_PREFILLS = frozenset({Role.PREFILL, Role.AUTO})
_DECODES = frozenset({Role.DECODE, Role.AUTO})


def kv_tokens(request: GenerateRequest) -> int:
    """Tokens of KV the request will hold at its end, as far as one can know before it ran."""
    wanted = DEFAULT_OUTPUT_TOKENS if request.max_tokens is None else request.max_tokens
    return request.prompt_tokens + min(wanted, 4 * DEFAULT_OUTPUT_TOKENS)


@dataclass(frozen=True, slots=True)
class PlanTable:
    """Prices plans against a ledger and a latency model; holds no state of its own."""

    ledger: Ledger
    rates: Rates

    def candidates(
        self, request: GenerateRequest, failed: tuple[str, ...] = (), *, whole_only: bool = False
    ) -> tuple[Candidate, ...]:
        """Return every plan for `request`, feasible or not.

        `failed` workers are avoided where another can serve; `whole_only` gives up on splitting,
        which is how a request survives a hand-off that broke.
        """
        accounts = self.ledger.serving(request.model)
        alive = [a for a in accounts if a.snapshot.worker_id not in failed] or accounts
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
        usable = [a for a in alive if not a.snapshot.draining]
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
        if not why_not and worker.role not in allowed:
            why_not = f"its role is {worker.role}"
        tokens = account.pending_prefill_tokens + request.prompt_tokens
        step_s = self.rates.decode_step_s(worker.worker_id)
        return Candidate(
            plan=PlanKind.AGGREGATED,
            prefill_worker=worker.worker_id,
            decode_worker=worker.worker_id,
            predicted_ttft_s=self.rates.prefill_s(worker.worker_id, tokens) + step_s,
            predicted_tpot_s=step_s,
            why_not=why_not or account.why_full(kv_tokens(request)),
        )

    def _pairs(self, request: GenerateRequest, alive: list[WorkerAccount]) -> Iterator[Candidate]:
        decodes = [a for a in alive if a.snapshot.role in _DECODES]
        for prefill in alive:
            if prefill.snapshot.role not in _PREFILLS:
                continue
            for decode in decodes:
                if decode is not prefill:
                    yield self._price_pair(request, prefill, decode)

    def _price_pair(
        self, request: GenerateRequest, prefill: WorkerAccount, decode: WorkerAccount
    ) -> Candidate:
        p, d = prefill.snapshot, decode.snapshot
        why_not = self._refusal(request, PlanKind.DISAGGREGATED, (p.worker_id, d.worker_id))
        if not why_not and (p.draining or d.draining):
            why_not = "draining"
        why_not = why_not or why_not_pair(p, d)
        why_not = why_not or prefill.why_full(request.prompt_tokens)
        why_not = why_not or decode.why_full(kv_tokens(request))
        tokens = prefill.pending_prefill_tokens + request.prompt_tokens
        kv_bytes = request.prompt_tokens * p.kv_bytes_per_token
        transfer_s = self.rates.transfer_s(p.worker_id, d.worker_id, kv_bytes)
        return Candidate(
            plan=PlanKind.DISAGGREGATED,
            prefill_worker=p.worker_id,
            decode_worker=d.worker_id,
            predicted_ttft_s=self.rates.prefill_s(p.worker_id, tokens) + transfer_s,
            predicted_tpot_s=self.rates.decode_step_s(d.worker_id),
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
