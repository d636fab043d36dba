"""What a scheduling decision costs under `slack`, how that grows, and how fast simulations run.

A decision is one `Scheduler.step`: an event in, commands out. The events are those of a simulated
fleet on which some 16 requests run per worker and as many wait: arrivals, first tokens, progress of
streams twenty times a second per worker, finishes. What waits is interactive (in order of deadline;
up to 32 heads are tried on every worker) or batch.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.result import envelope
from splitserve import messages as m
from splitserve.performance.coefficients import KNOWN
from splitserve.scheduling import Scheduler, SchedulerLimits
from splitserve.scheduling.policies.slack import Slack
from splitserve.simulation.driver import MODEL, SimulatedWorker, Simulation, World
from splitserve.simulation.job import EngineShape
from splitserve.simulation.results import percentiles
from splitserve.simulation.trace import TraceRequest

FLEETS = ((4, 64), (16, 256), (64, 1024), (256, 4096))  # workers, waiting requests
ASKED_PER_WORKER = 10  # they grow to about 16 by the time the watch starts
TARGET_P99_MS = {"16 workers, 256 waiting": 2.0, "256 workers, 4096 waiting": 10.0}
_SPEED = replace(KNOWN["rtx4090-llama-3.1-8b"], budget_tokens=512)
_KV_TOKENS = 41_408
_LIMITS = SchedulerLimits(queue=1 << 30, max_wait_s=1e9)
_PATIENT = m.Slo(ttft_s=600.0, tpot_s=0.024)  # may wait for long, and is protected once it runs
_BATCH = m.Slo(deadline_s=86_400.0)
_FULL_AT_S = 6.0  # by then the fleet is full; the queue comes
_TIMED_FROM_S = 6.2

Json = dict[str, Any]


class TimedScheduler(Scheduler):
    """Keeps what each step took, by kind of event, while `timing`."""

    def __init__(self) -> None:
        super().__init__(Slack(), _LIMITS)
        self.timing = False
        self.took_s: dict[str, list[float]] = {}

    def step(self, event: m.Event, now_s: float) -> list[m.Command]:
        """As its parent, with a watch."""
        started_s = time.perf_counter()
        commands = super().step(event, now_s)
        if self.timing:
            took_s = time.perf_counter() - started_s
            self.took_s.setdefault(type(event).__name__, []).append(took_s)
        return commands


def run() -> Json:
    """Return costs in milliseconds and their growth, and the speed of the simulator."""
    result = envelope("splitserve.scheduling-cost/1", "scheduling-cost", seed=1)
    result["systems"] = {
        f"{workers} workers, {waiting} waiting": {
            kind: decision_cost(workers, waiting, kind) for kind in ("interactive", "batch")
        }
        for workers, waiting in FLEETS
    }
    result["target_p99_ms"] = TARGET_P99_MS
    result["simulation"] = simulation_speed()
    return result


def decision_cost(workers: int, waiting: int, kind: str, events: int = 1000) -> Json:
    """Fill a fleet, let `waiting` requests of `kind` wait, and time some `events`. Milliseconds."""
    scheduler = TimedScheduler()
    simulation = Simulation(scheduler, _world(workers))

    def watch(now_s: float) -> None:
        scheduler.timing = now_s >= _TIMED_FROM_S

    # Each worker's streams are told of twenty times a second, the rest is about half as much.
    until_s = _TIMED_FROM_S + events / (30 * workers)
    simulation.run(_queueing(workers, waiting, kind, until_s), until_s, watch)
    every = [took_s for values in scheduler.took_s.values() for took_s in values]
    return {
        "running": scheduler.live - scheduler.queued,
        "waiting": scheduler.queued,
        "decisions": len(every),
        "decision_ms": _ms(every),
        "by_event_ms": {name: _ms(values) for name, values in sorted(scheduler.took_s.items())},
    }


def _queueing(workers: int, waiting: int, kind: str, until_s: float) -> list[TraceRequest]:
    """Requests that fill the fleet, then those that wait, then as many more as end."""
    draw = random.Random(1)

    def request(at_s: float, slo: m.Slo, service_class: str) -> TraceRequest:
        prompt = max(100, round(draw.gauss(1000, 300)))
        return TraceRequest(at_s, prompt, 600, service_class, slo, max_tokens=1000)

    streams = workers * ASKED_PER_WORKER
    first = [request(_FULL_AT_S * 0.8 * n / streams, _PATIENT, "chat") for n in range(streams)]
    slo = _PATIENT if kind == "interactive" else _BATCH
    queue = [request(_FULL_AT_S, slo, kind) for _ in range(waiting)]
    arrivals_s = 1.0 * workers
    count = int((until_s - _FULL_AT_S) * arrivals_s)
    later = [request(_FULL_AT_S + n / arrivals_s, _PATIENT, "chat") for n in range(count)]
    return sorted([*first, *queue, *later], key=lambda r: r.at_s)


def simulation_speed(workers: int = 4, requests_s: float = 7.6, length_s: float = 240.0) -> Json:
    """Play a synthetic mix as heavy as azure-flood; how many times faster than real time it is."""
    draw = random.Random(1)
    trace, at_s = [], 0.0
    while at_s < length_s:
        at_s += draw.expovariate(requests_s)
        prompt = min(7000, round(draw.lognormvariate(6.9, 0.9)))
        output = min(1000, 1 + round(draw.expovariate(1 / 150)))
        slo = m.Slo(1.0 + 2e-4 * prompt, 0.05)
        trace.append(TraceRequest(at_s, max(1, prompt), output, "chat", slo, max_tokens=1000))
    trace += [TraceRequest(10.0, 2600, 290, "batch", _BATCH)] * 200
    trace.sort(key=lambda r: r.at_s)
    simulation = Simulation(Scheduler(Slack(), _LIMITS), _world(workers))
    started_s = time.process_time()
    outcomes = simulation.run(trace, length_s)
    cpu_s = time.process_time() - started_s
    targeted = [o for o in outcomes if not o.trace.batch]
    return {
        "times_real": round(length_s / cpu_s, 1),
        "attainment": round(sum(o.good for o in targeted) / len(targeted), 3),
        "steps_per_cpu_s": round(sum(e.steps for e in simulation.engines.values()) / cpu_s),
    }


def _world(workers: int) -> World:
    def worker(number: int) -> SimulatedWorker:
        snapshot = m.WorkerSnapshot(
            f"w{number}",
            m.Role.AUTO,
            "simulated",
            (MODEL,),
            max_running=1 << 30,
            kv_capacity_tokens=_KV_TOKENS,
            step_tokens=_SPEED.budget_tokens,
            coefficients=_SPEED,
        )
        return SimulatedWorker(snapshot, EngineShape(_KV_TOKENS), _SPEED)

    return World(tuple(worker(number) for number in range(workers)))


def _ms(values_s: Sequence[float]) -> Json:
    found = percentiles([value * 1e3 for value in values_s])
    return {name: round(value, 4) for name, value in found.items() if value is not None}


if __name__ == "__main__":
    import json

    print(json.dumps(run(), indent=2))
