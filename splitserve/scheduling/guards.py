"""Guards: may this request join this worker without breaking a promise, its own or another's?

Formulas and their derivation are in docs/SCHEDULING.md; names follow it: N streams, K KV tokens,
Q and Z pending prefill, F prefill time, D' the decode step once the newcomer decodes too.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from splitserve.messages import GenerateRequest
from splitserve.performance.lengths import Lengths
from splitserve.scheduling.ledger import Booking, Phase, WorkerAccount

_EARLY, _LATE = 0.2, 0.8  # quantiles of remaining length: for protecting, for giving up
HEADROOM = 1.1  # on the decode step, against TPOT targets
_KV_SHARE = 0.92
_SLOW_WORKER = 1.5
OTHERS_STEP = "a step would be slower than a TPOT target here"
OWN_STEP = "a step would be slower than the request's own limit"


@dataclass(frozen=True, slots=True)
class GuardSettings:
    """What may be turned. Guards can be switched off one by one, to see what each is worth."""

    batch_kv_share: float = 0.5
    running: bool = True  # G2a
    pending: bool = True  # G2b
    rate: bool = True  # G3
    memory: bool = True  # G4


@dataclass(slots=True)
class Protected:
    """A worker's streams that must not be delayed too far, grouped by remaining length.

    `latest_s[l]` is the earliest instant at which some stream with l tokens to go must have its
    last one. `tightest_s` is the smallest TPOT target among interactive requests here.
    """

    version: int = -1
    at_s: float = -1.0
    latest_s: dict[int, float] = field(default_factory=dict)
    first_s: float = float("inf")  # the earliest of them: no stall may reach past it
    tightest_s: float = float("inf")


@dataclass(slots=True)
class Guards:
    """Checks one newcomer against one worker. Caches what it derived from a worker's streams."""

    lengths: Lengths
    settings: GuardSettings = GuardSettings()
    _cache: dict[str, Protected] = field(default_factory=dict)

    def protected(self, account: WorkerAccount, now_s: float) -> Protected:
        """Return the worker's protected streams, derived anew when something changed."""
        known = self._cache.get(account.worker_id)
        if known is not None and known.version == account.version:
            return known
        fresh = Protected(account.version, now_s)
        step_s = account.model.decode_step_s(account.streams, account.kv_streams_tokens)
        for booking in account.bookings.values():
            target_s = booking.request.slo.tpot_s
            if target_s is None or booking.batch or not booking.decodes_here:
                continue
            alone_s = account.model.decode_step_s(1, booking.request.prompt_tokens)
            if HEADROOM * alone_s <= target_s:  # else no company could be small enough
                fresh.tightest_s = min(fresh.tightest_s, target_s)
            if booking.phase is Phase.DECODING:
                self._protect(fresh, booking, target_s, step_s, now_s)
        self._cache[account.worker_id] = fresh
        return fresh

    def _protect(
        self, into: Protected, booking: Booking, target_s: float, step_s: float, now_s: float
    ) -> None:
        said = booking.tokens
        late = self.lengths.left(booking.request, _LATE, said)
        end_s = booking.first_token_s + target_s * (said + late - 1)
        if now_s + late * step_s > end_s:
            return  # lost: one lost stream must not close its worker to all prefill
        left = self.lengths.left(booking.request, _EARLY, said)
        latest_s = booking.first_token_s + target_s * (said + left - 1)
        known_s = into.latest_s.get(left)
        if known_s is None or latest_s < known_s:
            into.latest_s[left] = latest_s
            into.first_s = min(into.first_s, latest_s)

    def why_decode_breaks(
        self,
        account: WorkerAccount,
        request: GenerateRequest,
        *,
        batch: bool,
        floor_s: float,
        now_s: float,
    ) -> str:
        """G3 and G4: the step stays quick enough for all, and the KV fits.

        `floor_s` is the newcomer's own limit on a step: its TPOT target, or batch's floor.
        """
        tokens = request.prompt_tokens
        kv = account.kv_soon_tokens
        if self.settings.memory and account.bookings:
            room = account.snapshot.kv_capacity_tokens
            need = tokens + self.lengths.mean(request)
            if room and kv + need > _KV_SHARE * room:
                return "no KV room"
            if (
                room
                and batch
                and account.batch_kv_tokens + need > (self.settings.batch_kv_share * room)
            ):
                return "batch has its share of KV"
        if self.settings.rate:
            step_s = account.model.decode_step_s(account.streams_soon + 1, kv + tokens)
            if batch:  # a worker too slow for the floor even alone may still take a little
                alone_s = account.model.decode_step_s(1, tokens)
                floor_s = max(floor_s, _SLOW_WORKER * alone_s)
            if HEADROOM * step_s > self.protected(account, now_s).tightest_s:
                return OTHERS_STEP
            if HEADROOM * step_s > floor_s:
                return OWN_STEP
        return ""

    def why_prefill_breaks(
        self,
        account: WorkerAccount,
        fresh: int,
        fresh_area: float,
        prompt_tokens: int,
        now_s: float,
    ) -> str:
        """G2a and G2b: nobody who decodes or waits here is stalled past its TPOT target."""
        model = account.model
        known = self.protected(account, now_s)
        least_s = fresh * model.coefficients.per_prompt_token_s * model.prefill_drift.value
        if self.settings.running and now_s + least_s > known.first_s:
            return "a running stream would miss its TPOT target"
        n, kv = account.streams_soon, account.kv_soon_tokens
        step_s = model.decode_step_s(n + 1, kv + prompt_tokens)
        queued = account.pending_prefill_tokens + fresh
        if self.settings.running and known.latest_s:
            stall_s = model.prefill_s(queued, account.pending_area + fresh_area, n, kv)
            advance = model.coefficients.prefill_steps(queued, n)
            for left, latest_s in known.latest_s.items():
                if now_s + stall_s + max(0, left - advance) * step_s > latest_s:
                    return "a running stream would miss its TPOT target"
        if self.settings.pending and account.pending:
            return self._why_pending_breaks(account, fresh, fresh_area, step_s)
        return ""

    def _why_pending_breaks(
        self, account: WorkerAccount, fresh: int, fresh_area: float, step_s: float
    ) -> str:
        model = account.model
        n, kv = account.streams_soon + 1, account.kv_soon_tokens
        behind, behind_area = fresh, fresh_area
        for booking in reversed(account.bookings.values()):
            if booking.phase is not Phase.PENDING:
                continue
            target_s = booking.request.slo.tpot_s
            if target_s is not None and not booking.batch and booking.decodes_here:
                left = self.lengths.left(booking.request, _EARLY, 1)
                stall_s = model.prefill_s(behind, behind_area, n, kv)
                advance = model.coefficients.prefill_steps(behind, n)
                if stall_s + max(0, left - advance) * step_s > target_s * left:
                    return "a waiting prompt would miss its TPOT target"
            behind += booking.uncached_tokens
            behind_area += booking.area
        return ""
