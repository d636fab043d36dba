"""How far the simulator lies from native workers that run on this machine: `bench live-fidelity`.

One trace is played twice through a router and its workers. From the first pass the router learns
how fast the workers are; the second is measured. The simulator then plays the same trace with what
the router had learnt by then, and the percentiles of both are compared.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cluster import cluster, get_json
from benchmarks.open_loop import Answered, Arrival, client, play
from benchmarks.result import envelope
from splitserve import messages as m
from splitserve.performance.coefficients import Coefficients
from splitserve.simulation import fidelity
from splitserve.simulation.driver import MODEL as SIMULATED_MODEL
from splitserve.simulation.job import EngineShape
from splitserve.simulation.readers import Recorded
from splitserve.simulation.trace import TraceRequest
from splitserve.simulation.world import SimulatedWorker, World

SCHEMA = "splitserve.bench.live-fidelity/1"
BAR = 0.15
_MODEL = "smollm2-135m"
_CONFIG = (
    "policy: least-requests\n"
    "classes:\n"
    "  interactive: {ttft_ms: 60000, tpot_ms: 5000}\n"
    "limits: {max_wait_s: 600}\n"
)


@dataclass(frozen=True, slots=True)
class Load:
    """The trace: Poisson arrivals, sizes drawn evenly between bounds, in tokens."""

    requests: int = 120
    rate_s: float = 0.8
    prompt_tokens: tuple[int, int] = (32, 384)
    output_tokens: tuple[int, int] = (8, 32)
    workers: int = 2
    seed: int = 1


def run(load: Load | None = None) -> dict[str, Any]:
    """Measure, simulate, compare. Returns one JSON document; `error` is simulated / real - 1."""
    load = load or Load()
    trace = _trace(load)
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "splitserve.yaml"
        config.write_text(_CONFIG, encoding="utf-8")
        roles = ("--prefill", "0", "--decode", "0", "--aggregated", str(load.workers))
        with cluster("-c", str(config), "--model", _MODEL, *roles) as base:
            asyncio.run(_play(base, trace, load.seed + 1))
            answers = asyncio.run(_play(base, trace, load.seed + 2))
            shown = get_json(f"{base}/admin/workers")["workers"]
    compared = fidelity.compare(_recorded(trace, answers), _world(shown))
    measures = fidelity.MEASURES
    return {
        **envelope(SCHEMA, "live-fidelity", seed=load.seed),
        "requests": load.requests,
        "send_lag_ms": max(answer.lag_s for answer in answers) * 1e3,
        "mean_ms": {measure: compared.means_ms(measure) for measure in measures},
        "error": {measure: compared.percentile_error(measure) for measure in measures},
        "bar": BAR,
        "latency_models": {each["id"]: each["latency_model"] for each in shown},
    }


def _trace(load: Load) -> list[TraceRequest]:
    draw = random.Random(load.seed)
    trace, at_s = [], 0.0
    for _ in range(load.requests):
        at_s += draw.expovariate(load.rate_s)
        prompt, output = draw.randint(*load.prompt_tokens), draw.randint(*load.output_tokens)
        trace.append(TraceRequest(at_s, prompt, output, slo=m.Slo(60.0, 5.0), max_tokens=output))
    return trace


async def _play(base: str, trace: Sequence[TraceRequest], seed: int) -> list[Answered]:
    draw = random.Random(seed)  # prompts that no pass before has left in a cache
    arrivals = [Arrival(each.at_s, _body(each, draw)) for each in trace]
    async with client(base) as http:
        return await play(http, arrivals)


def _body(request: TraceRequest, draw: random.Random) -> dict[str, Any]:
    return {
        "model": _MODEL,
        "prompt": [draw.randrange(1000, 40000) for _ in range(request.prompt_tokens)],
        "max_tokens": request.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


def _recorded(trace: Sequence[TraceRequest], answers: Sequence[Answered]) -> list[Recorded]:
    return [
        Recorded(request, answer.ttft_s, answer.tpot_s, answer.e2e_s)
        for request, answer in zip(trace, answers, strict=True)
    ]


def _world(shown: Sequence[dict[str, Any]]) -> World:
    return World(tuple(_worker(each) for each in shown), step_noise=0.0)


def _worker(shown: dict[str, Any]) -> SimulatedWorker:
    speed = Coefficients(**shown["latency_model"])
    snapshot = m.WorkerSnapshot(
        shown["id"],
        m.Role.AGGREGATED,
        "simulated",
        (SIMULATED_MODEL,),
        max_running=shown["max_running"],
        kv_capacity_tokens=shown["kv_capacity_tokens"],
        step_tokens=speed.budget_tokens,
        coefficients=speed,
    )
    shape = EngineShape(shown["kv_capacity_tokens"], shown["max_running"])
    return SimulatedWorker(snapshot, shape, speed)
