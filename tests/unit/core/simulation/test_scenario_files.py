"""Scenario files: what is read from them, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from splitserve.messages import Role, Slo
from splitserve.simulation.scenario import (
    DecisionScenario,
    FidelityScenario,
    ServeScenario,
    Targets,
    exact,
    load,
)
from splitserve.simulation.toml_table import ScenarioError
from splitserve.simulation.workload import batch_jobs
from splitserve.simulation.world import LinkFault, WorkerFault

ROOT = Path(__file__).parents[4]
SCENARIOS = sorted((ROOT / "benchmarks" / "scenarios").glob("*.toml"))

SMALL = """
kind = "serve"
[windows]
starts_s = [0, 10]
length_s = 20
[groups]
all = ["chat"]
[links]
gbit_s = 8
[[workers]]
count = 2
role = "prefill"
kv_tokens = 1000
prior = "rtx4090-llama-3.1-8b"
true_ms = {step = 10, per_sequence = 1, per_kv_token = 0.1, prefill_step = 5, per_prompt_token = 0.5, per_prompt_token2 = 0.01}
[[traffic]]
class = "chat"
trace = "x.csv"
targets = {ttft_ms = 1000, ttft_per_prompt_token_ms = 0.2, tpot_ms = 50}
[batch]
lengths = "y.csv"
jobs = 7
at_s = 1
up_to_rate = 0.8
[faults]
workers = [{worker = "w1", at_s = 3, back_s = 5}]
links = [{from = "w0", to = "w1", at_s = 2}]
"""  # noqa: E501


def read(text: str, folder: Path) -> ServeScenario:
    path = folder / "small.toml"
    path.write_text(text)
    scenario = load(path)
    assert isinstance(scenario, ServeScenario)
    return scenario


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_the_projects_own_scenarios_load(path: Path) -> None:
    scenario = load(path)
    assert scenario.name == path.stem
    kinds = {"disagg-decision": DecisionScenario, "fidelity-4090": FidelityScenario}
    assert isinstance(scenario, kinds.get(path.stem, ServeScenario))


def test_all_scenarios_are_there() -> None:
    names = {path.stem for path in SCENARIOS}
    expected = {"azure-flood", "equal-fleet", "unequal-fleet", "disagg-decision", "fidelity-4090"}
    assert expected <= names


def test_what_is_read(tmp_path: Path) -> None:
    scenario = read(SMALL, tmp_path)
    world = scenario.world
    assert [w.snapshot.worker_id for w in world.workers] == ["w0", "w1"]
    worker = world.workers[1]
    assert worker.snapshot.role is Role.PREFILL
    assert worker.shape.kv_tokens == worker.snapshot.kv_capacity_tokens == 1000
    assert worker.coefficients.step_s == 0.01
    assert worker.coefficients.budget_tokens == worker.snapshot.step_tokens == 2048
    assert worker.snapshot.coefficients is not None
    assert worker.snapshot.coefficients.step_s == 0.017
    assert world.link_bytes_s == 1e9
    assert world.worker_faults == (WorkerFault("w1", 3.0, 5.0),)
    assert world.link_faults == (LinkFault("w0", "w1", 2.0, None),)
    assert scenario.windows.scored_s == 20.0
    assert scenario.traffic[0].targets.slo(1000) == Slo(1.2, 0.05)


def test_an_exact_world_tells_the_truth(tmp_path: Path) -> None:
    for worker in exact(read(SMALL, tmp_path).world).workers:
        assert worker.snapshot.exact
        assert worker.snapshot.coefficients == worker.coefficients


def test_batch_jobs_come_up_to_a_rate_unless_asked_for(tmp_path: Path) -> None:
    scenario = read(SMALL, tmp_path)
    assert batch_jobs(scenario, 0.8, None) == 7
    assert batch_jobs(scenario, 1.0, None) == 0
    assert batch_jobs(scenario, 1.0, 3) == 3
    without = SMALL.replace("[batch]", "[other]").split("[other]", maxsplit=1)[0]
    assert batch_jobs(read(without, tmp_path), 0.5, 9) == 0


def test_targets_that_are_not_there() -> None:
    assert Targets(deadline_s=60.0).slo(10) == Slo(deadline_s=60.0)


@pytest.mark.parametrize(
    "old,new,said",
    [
        ("length_s", "lenght_s", "small.toml: windows: length_s is missing"),
        ('kind = "serve"', 'kind = "serv"', "kind must be one of serve, decision, fidelity"),
        ('kind = "serve"', 'kind = "serve"\nraet = 1', "unknown key 'raet'; did you mean 'rate'?"),
        ("tpot_ms = 50", "tpot = 50", "targets: unknown key 'tpot'; did you mean 'tpot_ms'?"),
        ("count = 2", "count = 0", "workers 1: count must be a whole number from 1 on, not 0"),
        ('role = "prefill"', 'role = "both"', "role must be one of prefill, decode, aggregated"),
        ("rtx4090-llama", "gtx1080-llama", "prior must be one of rtx4090-llama-3.1-8b"),
        ("jobs = 7", "jobs = 7.5", "batch: jobs must be a whole number from 0 on, not 7.5"),
        ("gbit_s = 8", "gbit_s = -8", "links: gbit_s must be a number, not negative, not -8"),
        ("gbit_s = 8", 'gbit_s = "8"', "links: gbit_s must be a number"),
        ("gbit_s = 8", "declared = 1", "links: declared must be true or false, not 1"),
        ("starts_s = [0, 10]", "starts_s = []", "starts_s must be a list of numbers"),
        ("[[workers]]", "[workers]", "workers must be an array of tables, [[workers]]"),
        ('["chat"]', '["chat", "coed"]', "groups: all names a class that has no [[traffic]]"),
        ('worker = "w1"', 'worker = "w2"', "there is no worker 'w2'"),
        ('kind = "serve"', "kind =", "small.toml: "),
        ("[windows]", "windows = 3\n[windowz]", "windows must be a table"),
    ],
)
def test_what_is_refused(old: str, new: str, said: str, tmp_path: Path) -> None:
    assert old in SMALL
    with pytest.raises(ScenarioError) as caught:
        read(SMALL.replace(old, new, 1), tmp_path)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"none\.toml: there is no such file"):
        load(tmp_path / "none.toml")
