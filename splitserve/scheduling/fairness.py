"""Token-fair order between tenants: virtual token counters inside a band.

A tenant's counter grows with what it was given, (prompt + 2 * output) / weight, and is lifted to
the smallest active one when it comes back from idle (VTC, OSDI 2024). While a request runs it is
charged what it may use, at its end what it did use. Requests that are about to miss their deadline
go first as long as their tenant is inside its guaranteed rate, so that nobody gains by declaring
tight deadlines for everything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from splitserve.messages import Candidate, GenerateRequest
from splitserve.scheduling.flight import Flight

_URGENT_S = 0.1
_GUARANTEED_TOK_S = 20_000.0  # of a tenant of weight 1
_BURST_TOKENS = 200_000.0
_OUTPUT_WEIGHT = 2  # an output token takes about twice the work of a prompt token
_UNKNOWN_OUTPUT_TOKENS = 256  # charged for a request that names no limit, until it ends
_MOST_OUTPUT_TOKENS = 1024  # charged at most until it ends: limits are often set far too high
_IDLE_S = 60.0  # without an arrival for so long, a tenant is idle


class Head(Protocol):
    """A waiting request with a deadline."""

    deadline_s: float
    flight: Flight


H = TypeVar("H", bound=Head)


@dataclass(slots=True)
class _Tenant:
    weight: float
    bucket_tokens: float
    refilled_s: float
    counter: float = 0.0

    def charge(self, tokens: float) -> None:
        """Take `tokens` from what is its due; below 0: give them back."""
        self.counter += tokens / self.weight
        self.bucket_tokens -= tokens


@dataclass(slots=True)
class Fairness:
    """Counters of all tenants that were seen."""

    _tenants: dict[str, _Tenant] = field(default_factory=dict)

    def arrived(self, request: GenerateRequest, now_s: float) -> None:
        """A tenant is active; one that was idle does not bring old credit."""
        weight = request.tenant_weight
        burst_tokens = _BURST_TOKENS * weight
        tenant = self._tenants.get(request.tenant)
        if tenant is None:
            tenant = _Tenant(weight, burst_tokens, now_s - 2 * _IDLE_S)
            self._tenants[request.tenant] = tenant
        tenant.weight = weight
        if now_s - tenant.refilled_s > _IDLE_S:
            others = [
                t.counter
                for t in self._tenants.values()
                if t is not tenant and now_s - t.refilled_s <= _IDLE_S
            ]
            tenant.counter = max(tenant.counter, min(others, default=0.0))
        tenant.bucket_tokens = min(
            burst_tokens,
            tenant.bucket_tokens + (now_s - tenant.refilled_s) * _GUARANTEED_TOK_S * weight,
        )
        tenant.refilled_s = now_s

    def served(self, request: GenerateRequest, plan: Candidate) -> None:
        """Charge a tenant for what was just started: what it may use."""
        self._tenants[request.tenant].charge(_advance_tokens(request))

    def settle(self, flight: Flight, prompt_tokens: int, output_tokens: int) -> None:
        """A request has ended: charge what it used in place of what each start of it might."""
        used_tokens = prompt_tokens + _OUTPUT_WEIGHT * output_tokens
        advance_tokens = flight.attempt * _advance_tokens(flight.request)
        self._tenants[flight.request.tenant].charge(used_tokens - advance_tokens)

    @property
    def several(self) -> bool:
        """True when there is more than one tenant to be fair to."""
        return len(self._tenants) > 1

    def order(self, heads: Sequence[H], now_s: float, limit: int) -> list[H]:
        """Return up to `limit` heads in the order in which they are tried."""
        if not self.several:
            return list(heads[:limit])
        window = heads[: 4 * limit]

        def rank(head: H) -> tuple[bool, float, float]:
            tenant = self._tenants[head.flight.request.tenant]
            urgent = head.deadline_s < now_s + _URGENT_S and tenant.bucket_tokens > 0
            return (not urgent, 0.0 if urgent else tenant.counter, head.deadline_s)

        return sorted(window, key=rank)[:limit]

    def counter(self, tenant: str) -> float:
        """What a tenant was given so far."""
        known = self._tenants.get(tenant)
        return known.counter if known is not None else 0.0


def _advance_tokens(request: GenerateRequest) -> int:
    wanted = _UNKNOWN_OUTPUT_TOKENS if request.max_tokens is None else request.max_tokens
    return request.prompt_tokens + _OUTPUT_WEIGHT * min(wanted, _MOST_OUTPUT_TOKENS)


class TenantQueues:
    """Requests of one band: in order of arrival within a tenant, tenants by their counters."""

    def __init__(self, fairness: Fairness) -> None:
        self._fairness = fairness
        self._queues: dict[str, deque[Flight]] = {}

    def add(self, flight: Flight, *, first: bool = False) -> None:
        """Queue a flight behind its tenant's others, or before them."""
        queue = self._queues.setdefault(flight.request.tenant, deque())
        if first:
            queue.appendleft(flight)
        else:
            queue.append(flight)

    def first(self) -> Flight | None:
        """Return the next flight, which stays queued."""
        if not self._queues:
            return None
        tenant = min(self._queues, key=self._fairness.counter)
        return self._queues[tenant][0]

    def take(self, flight: Flight) -> None:
        """Remove a flight; one that is not here is no matter."""
        tenant = flight.request.tenant
        queue = self._queues.get(tenant)
        if queue is None or flight not in queue:
            return
        queue.remove(flight)
        if not queue:
            del self._queues[tenant]

    def oldest_s(self) -> float:
        """Arrival of the first flight of any tenant; infinite when empty."""
        return min((q[0].arrived_s for q in self._queues.values()), default=float("inf"))
