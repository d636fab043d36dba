"""What would have become of the last minutes' requests under other roles?

Arrivals are recorded as sizes and targets, no text. Each proposal plays them through a fresh
Scheduler and simulated engines that have the fits of now.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from splitserve.messages import GenerateRequest, Role, WorkerSnapshot
from splitserve.performance.coefficients import Coefficients
from splitserve.scheduling import Scheduler, SchedulerLimits
from splitserve.scheduling.policies.slack import Slack
from splitserve.simulation.driver import SimulatedWorker, Simulation, World
from splitserve.simulation.engine import EngineShape
from splitserve.simulation.trace import TraceRequest

MEMORY_S = 300.0
_DRAIN_S = 60.0  # after the last arrival, so that late ones can still end well
_UNKNOWN_KV_TOKENS = 100_000


@dataclass(slots=True)
class ArrivalMemory:
    """The arrivals of the last `MEMORY_S`, at most `limit` of them."""

    limit: int = 20_000
    _ring: deque[tuple[float, GenerateRequest]] = field(default_factory=deque)
    _outputs: dict[str, int] = field(default_factory=dict)

    def arrived(self, request: GenerateRequest, now_s: float) -> None:
        """Remember a request."""
        self._ring.append((now_s, request))
        while self._ring and (self._ring[0][0] < now_s - MEMORY_S or len(self._ring) > self.limit):
            self._outputs.pop(self._ring.popleft()[1].request_id, None)

    def finished(self, request_id: str, output_tokens: int) -> None:
        """Remember how long its answer was."""
        self._outputs[request_id] = output_tokens

    def trace(self) -> list[TraceRequest]:
        """Return the arrivals as a trace that begins at 0; unknown outputs take the mean."""
        if not self._ring:
            return []
        start_s = self._ring[0][0]
        known = [
            self._outputs[r.request_id] for _, r in self._ring if r.request_id in self._outputs
        ]
        mean = max(1, round(sum(known) / len(known))) if known else 100
        return [
            TraceRequest(
                at_s - start_s,
                request.prompt_tokens,
                max(1, self._outputs.get(request.request_id, mean)),
                request.service_class,
                request.slo,
                request.block_hashes,
            )
            for at_s, request in self._ring
        ]


@dataclass(frozen=True, slots=True)
class Fleet:
    """What a proposal is tried on: the workers with the fits of now, and their links."""

    workers: tuple[WorkerSnapshot, ...]
    coefficients: Mapping[str, Coefficients]
    link_bytes_s: float

    def with_roles(self, roles: Mapping[str, Role]) -> World:
        """Build a world in which workers have these roles."""
        simulated = []
        for worker in self.workers:
            speed = self.coefficients[worker.worker_id]
            kv_tokens = worker.kv_capacity_tokens or _UNKNOWN_KV_TOKENS
            snapshot = replace(
                worker,
                role=roles.get(worker.worker_id, worker.role),
                models=("m",),
                kv_capacity_tokens=kv_tokens,
                coefficients=speed,
                exact=True,
                draining=False,
            )
            shape = EngineShape(kv_tokens, max_sequences=max(1, worker.max_running))
            simulated.append(SimulatedWorker(snapshot, shape, speed))
        measured = self.link_bytes_s > 0
        world = World(tuple(simulated), declare_links=measured, step_noise=0.0)
        return replace(world, link_bytes_s=self.link_bytes_s) if measured else world


def goodput(fleet: Fleet, trace: list[TraceRequest], roles: Mapping[str, Role]) -> float:
    """Share of the trace's targeted requests that would have been good, 0 to 1."""
    targeted = [r for r in trace if r.slo.ttft_s is not None or r.slo.tpot_s is not None]
    if not targeted:
        return 1.0
    limits = SchedulerLimits(queue=len(trace) + 1, max_wait_s=1e9)
    simulation = Simulation(Scheduler(Slack(), limits), fleet.with_roles(roles))
    outcomes = simulation.run(trace, until_s=trace[-1].at_s + _DRAIN_S)
    good = sum(o.good for o in outcomes if o.trace in targeted or o.trace.slo.ttft_s is not None)
    return min(1.0, good / len(targeted))


def proposals(fleet: Fleet) -> Iterator[dict[str, Role]]:
    """Yield role assignments for the `auto` workers: |P| prefill from 0 to half of them.

    With any prefill workers there is at least one that decodes: neither side is ever empty. The
    workers that prefill fastest, relative to how they decode, become prefill workers first.
    """
    auto = [w.worker_id for w in fleet.workers if w.role is Role.AUTO]

    def prefill_lead(worker_id: str) -> float:
        speed = fleet.coefficients[worker_id]
        return speed.per_prompt_token_s / max(speed.step_s, 1e-9)

    ranked = sorted(auto, key=lambda worker_id: (prefill_lead(worker_id), worker_id))
    for count in range(len(auto) // 2 + 1):
        chosen = set(ranked[:count])
        split = Role.DECODE if count else Role.AUTO
        yield {w: Role.PREFILL if w in chosen else split for w in auto}
