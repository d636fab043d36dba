"""Figures that must hold: fidelity to a real engine, the order of policies, same seed same result.

They run on slices of published traces in tests/data/traces, so they run everywhere.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from splitserve.simulation.decision import RULES, judge, mean_regret
from splitserve.simulation.fidelity import MEASURES, compare
from splitserve.simulation.figures import figures
from splitserve.simulation.readers import TraceError, read_recorded
from splitserve.simulation.scenario import (
    DecisionScenario,
    FidelityScenario,
    ServeScenario,
    load,
)
from splitserve.simulation.serving import CLAIRVOYANT, Cell, run_cell
from splitserve.simulation.workload import TraceFolder, batch_jobs, window_trace

ROOT = Path(__file__).parents[4]
DATA = ROOT / "tests" / "data"
SCENARIOS = ROOT / "benchmarks" / "scenarios"
MOST_ERROR = {"ttft": 0.10, "tpot": 0.05, "e2e": 0.05}


def play(scenario: ServeScenario, folder: TraceFolder, policy: str, number: int = 0) -> Any:
    """One window's figures as JSON would have them."""
    start_s, seed = scenario.windows.starts_s[number], scenario.seed + number
    jobs = batch_jobs(scenario, scenario.rate, None)
    trace = window_trace(scenario, folder, start_s, rate=scenario.rate, jobs=jobs, seed=seed)
    windows = scenario.windows
    world = replace(scenario.world, seed=seed)
    cell = Cell(policy, start_s, windows.length_s, windows.scored_s, world, tuple(trace))
    return figures([run_cell(cell)], scenario.groups)


def share(found: Any) -> float:
    count = found["attainment"]["interactive"]
    return float(count["met"] / count["total"])


@pytest.fixture(scope="module")
def mini_flood() -> ServeScenario:
    scenario = load(DATA / "scenarios" / "mini-flood.toml")
    assert isinstance(scenario, ServeScenario)
    return scenario


@pytest.fixture(scope="module")
def folder() -> TraceFolder:
    return TraceFolder(DATA / "traces")


def test_simulated_times_are_those_of_a_real_engine() -> None:
    scenario = load(SCENARIOS / "fidelity-4090.toml")
    assert isinstance(scenario, FidelityScenario)
    recorded = read_recorded(DATA / "traces" / scenario.recording)
    assert len(recorded) == 300
    compared = compare(recorded, scenario.world)
    errors = {name: compared.error(name) for name in MEASURES}
    assert all(abs(errors[name]) <= MOST_ERROR[name] for name in MEASURES), errors
    for name in MEASURES:
        for error in compared.percentile_error(name).values():
            assert abs(error) <= 0.10


def test_an_engine_with_too_little_memory_fails_the_gate() -> None:
    scenario = load(SCENARIOS / "fidelity-4090.toml")
    assert isinstance(scenario, FidelityScenario)
    worker = scenario.world.workers[0]
    small = replace(worker, shape=replace(worker.shape, kv_tokens=31_000))
    recorded = read_recorded(DATA / "traces" / scenario.recording)
    compared = compare(recorded, replace(scenario.world, workers=(small,)))
    assert compared.error("ttft") > MOST_ERROR["ttft"]


def test_slack_holds_the_flood_and_others_do_not(
    mini_flood: ServeScenario, folder: TraceFolder
) -> None:
    found = {
        name: play(mini_flood, folder, name)
        for name in ("slack", "least-requests", "lmetric", "capped", CLAIRVOYANT)
    }
    shares = {name: share(figures) for name, figures in found.items()}
    assert shares["slack"] >= 0.85, shares
    assert shares["slack"] >= 2 * max(shares["least-requests"], shares["lmetric"]), shares
    assert shares["slack"] >= 1.1 * shares["capped"], shares
    assert shares["slack"] >= 0.92 * shares[CLAIRVOYANT], shares
    assert found["slack"]["batch_jobs_done"][0] >= 60, "batch is not starved"


def test_coefficients_are_found_from_a_wrong_prior(
    mini_flood: ServeScenario, folder: TraceFolder
) -> None:
    found = play(mini_flood, folder, "slack")
    assert found["model_error"]["decode"] < 0.05
    assert found["model_error"]["prefill"] < 0.15
    for worker in found["workers"].values():
        fitted, true = worker["coefficients_fitted"], worker["coefficients_true"]
        for name in ("step", "prefill_step", "per_prompt_token"):
            assert fitted[name] != pytest.approx(17.0 if name == "step" else 10.7, rel=1e-6)
        busy = {"fitted": fitted, "true": true}
        step_ms = {
            key: c["step"] + 20 * c["per_sequence"] + 20_000 * c["per_kv_token"]
            for key, c in busy.items()
        }
        assert step_ms["fitted"] == pytest.approx(step_ms["true"], rel=0.08)


def test_same_seed_same_bytes(mini_flood: ServeScenario, folder: TraceFolder) -> None:
    def dump(scenario: ServeScenario, policy: str) -> str:
        return json.dumps(play(scenario, folder, policy))

    for policy in ("slack", "power-of-two"):
        assert dump(mini_flood, policy) == dump(mini_flood, policy)
    other = replace(mini_flood, seed=2)
    assert dump(mini_flood, "slack") != dump(other, "slack")


def test_traces_without_a_folder_are_asked_for(mini_flood: ServeScenario) -> None:
    with pytest.raises(TraceError, match="give one with --traces"):
        play(mini_flood, TraceFolder(None), "slack")


@pytest.fixture(scope="module")
def small_sweep() -> DecisionScenario:
    scenario = load(SCENARIOS / "disagg-decision.toml")
    assert isinstance(scenario, DecisionScenario)
    links, prompts = (0.1, 1.0, 10.0, 100.0), (200, 2000, 16000)
    return replace(scenario, link_gbit_s=links, prompts_tokens=prompts, streams=(0, 8))


def test_plans_are_priced_as_they_turn_out(small_sweep: DecisionScenario) -> None:
    judged = judge(small_sweep, RULES)
    regrets = {name: mean_regret(rows) for name, rows in judged.items()}
    assert regrets["slack"] <= 0.08, regrets
    assert regrets["slack"] < 0.25 * min(r for n, r in regrets.items() if n != "slack"), regrets
    for rows in judged.values():
        assert all(row.regret() > -0.02 for row in rows), "nobody beats the oracle"


def test_a_faster_link_never_makes_the_split_worse(small_sweep: DecisionScenario) -> None:
    judged = judge(small_sweep, ("slack",))["slack"]
    for streams in small_sweep.streams:
        for prompt in small_sweep.prompts_tokens:
            plans = [
                row.plan
                for row in sorted(judged, key=lambda row: row.situation.link_gbit_s)
                if (row.situation.streams, row.situation.prompt_tokens) == (streams, prompt)
            ]
            assert plans == sorted(plans), f"{prompt} tokens beside {streams}: {plans}"


# --- the whole traces, where they are -------------------------------------------------------------

WHOLE = Path(os.environ.get("SPLITSERVE_TRACES", ROOT.parent / "shared" / "traces"))


@pytest.mark.skipif(
    not (WHOLE / "azure2023").is_dir(),
    reason=f"the whole traces are not in {WHOLE}; set SPLITSERVE_TRACES to have this checked",
)
def test_a_held_out_window_of_the_flood() -> None:
    scenario = load(SCENARIOS / "azure-flood.toml")
    assert isinstance(scenario, ServeScenario)
    scenario = replace(scenario, rate=0.8)
    traces = TraceFolder(WHOLE)
    slack = play(scenario, traces, "slack", 2)
    others = play(scenario, traces, "least-requests", 2)
    assert share(slack) >= 0.90
    assert share(slack) >= 2 * share(others)
    assert slack["batch_jobs_done"][0] >= 340
