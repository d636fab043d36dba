"""Token-fair order between tenants: virtual token counters inside a band.

A tenant's counter grows with what it was given, (uncached prompt + 2 * output) / weight, and is
lifted to the smallest active one when it comes back from idle (VTC, OSDI 2024). Requests that are
about to miss their deadline go first as long as their tenant is inside its guaranteed rate, so
that nobody gains by declaring tight deadlines for everything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from splitserve.messages import Candidate, GenerateRequest
from splitserve.scheduling.flight import Flight

_URGENT_S = 0.1
_GUARANTEED_TOK_S = 20_000.0
_BURST_TOKENS = 200_000.0
_IDLE_S = 60.0  # without an arrival for so long, a tenant is idle


class Head(Protocol):
    """A waiting request with a deadline."""

    deadline_s: float
    flight: Flight


H = TypeVar("H", bound=Head)


@dataclass(slots=True)
class _Tenant:
    counter: float = 0.0
    bucket_tokens: float = _BURST_TOKENS
    refilled_s: float = 0.0


@dataclass(slots=True)
class Fairness:
    """Counters of all tenants that were seen."""

    weights: dict[str, float] = field(default_factory=dict)
    _tenants: dict[str, _Tenant] = field(default_factory=dict)

    def arrived(self, request: GenerateRequest, now_s: float) -> None:
        """A tenant is active; one that was idle does not bring old credit."""
        tenant = self._tenants.get(request.tenant)
        if tenant is None:
            tenant = self._tenants[request.tenant] = _Tenant(refilled_s=now_s - 2 * _IDLE_S)
        if now_s - tenant.refilled_s > _IDLE_S:
            others = [
                t.counter
                for t in self._tenants.values()
                if t is not tenant and now_s - t.refilled_s <= _IDLE_S
            ]
            tenant.counter = max(tenant.counter, min(others, default=0.0))
        tenant.bucket_tokens = min(
            _BURST_TOKENS,
            tenant.bucket_tokens + (now_s - tenant.refilled_s) * _GUARANTEED_TOK_S,
        )
        tenant.refilled_s = now_s

    def served(self, request: GenerateRequest, plan: Candidate) -> None:
        """Charge a tenant for what was just started."""
        tenant = self._tenants[request.tenant]
        tokens = request.prompt_tokens + 2 * (request.max_tokens or 256)
        tenant.counter += tokens / self.weights.get(request.tenant, 1.0)
        tenant.bucket_tokens -= tokens

    def order(self, heads: Sequence[H], now_s: float, limit: int) -> list[H]:
        """Return up to `limit` heads in the order in which they are tried."""
        if len(self._tenants) <= 1:
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
