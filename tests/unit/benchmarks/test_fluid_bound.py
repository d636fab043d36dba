"""The fluid bound: nobody passes it, and load lowers it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("scipy", reason="the bound needs the extra `bench`")

from benchmarks.fluid_bound import fluid_bound
from splitserve.messages import Slo
from splitserve.simulation.scenario import ServeScenario, load
from splitserve.simulation.serving import CLAIRVOYANT, Cell, run_cell
from splitserve.simulation.trace import TraceRequest
from splitserve.simulation.workload import TraceFolder, window_trace

DATA = Path(__file__).parents[2] / "data"


@pytest.fixture(scope="module")
def scenario() -> ServeScenario:
    found = load(DATA / "scenarios" / "mini-flood.toml")
    assert isinstance(found, ServeScenario)
    return found


def trace_at(scenario: ServeScenario, rate: float) -> list[TraceRequest]:
    folder = TraceFolder(DATA / "traces")
    return window_trace(scenario, folder, 0.0, rate=rate, jobs=0, seed=1)


def test_more_load_and_fewer_workers_lower_it(scenario: ServeScenario) -> None:
    shares = [fluid_bound(trace_at(scenario, rate), scenario.world, 60.0) for rate in (1, 4, 8)]
    assert 1.0 >= shares[0] > shares[1] > shares[2] > 0.0
    half = replace(scenario.world, workers=scenario.world.workers[:1])
    assert fluid_bound(trace_at(scenario, 4), half, 60.0) < shares[1]


def test_nobody_passes_it(scenario: ServeScenario) -> None:
    trace = trace_at(scenario, 4)
    cell = Cell(CLAIRVOYANT, 0.0, 80.0, 60.0, scenario.world, tuple(trace))
    assert run_cell(cell).targeted().share <= fluid_bound(trace, scenario.world, 60.0)


def test_what_one_worker_can_just_do(scenario: ServeScenario) -> None:
    world = replace(scenario.world, workers=scenario.world.workers[:1])
    speed = world.workers[0].coefficients
    prompt = 1000
    prefill_s = speed.per_prompt_token_s * prompt + speed.per_prompt_token2_s * prompt**2 / 2
    request = TraceRequest(0.0, prompt, 1, slo=Slo(ttft_s=0.9, tpot_s=0.0))
    able = 1.0 / prefill_s  # requests of one second's bin, were there no answers
    share = fluid_bound([request] * 40, world, 1.0)
    assert share == pytest.approx(able / 40, rel=0.05)
    assert share < able / 40


def test_a_slow_worker_counts_for_less(scenario: ServeScenario) -> None:
    fast = scenario.world.workers[0]
    crawl = replace(
        fast.coefficients,
        **{name: 5 * getattr(fast.coefficients, name) for name in _COEFFICIENTS},
    )
    trace = trace_at(scenario, 6)
    mixed = replace(scenario.world, workers=(fast, replace(fast, coefficients=crawl)))
    alone = replace(scenario.world, workers=(fast,))
    shares = [fluid_bound(trace, world, 60.0) for world in (alone, mixed, scenario.world)]
    assert shares[0] < shares[1] < shares[2]


_COEFFICIENTS = (
    "step_s",
    "per_sequence_s",
    "per_kv_token_s",
    "prefill_step_s",
    "per_prompt_token_s",
    "per_prompt_token2_s",
)
