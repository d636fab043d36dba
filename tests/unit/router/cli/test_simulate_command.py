"""`splitserve simulate`: one JSON document, tables, pictures, and one line for what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from router.cli.commands import run

ROOT = Path(__file__).parents[4]
TRACES = ROOT / "tests" / "data" / "traces"
MINI = f"-c {ROOT}/tests/data/scenarios/mini-flood.toml --traces {TRACES}"
LEAST = "--policy least_requests"

Said = pytest.CaptureFixture[str]


def document(arguments: str, said: Said) -> Any:
    assert run(["simulate", *arguments.split(), "--json"]) == 0
    captured = said.readouterr()
    assert captured.err == ""
    assert captured.out.count("\n") == 1
    return json.loads(captured.out)


def test_the_document(capsys: Said) -> None:
    found = document(f"{MINI} --policy slack {LEAST} --seed 4 --clairvoyant", capsys)
    assert found["schema"] == "splitserve.simulate/1"
    assert (found["scenario"], found["seed"], found["batch_jobs"]) == ("mini-flood", 4, 120)
    assert {"commit", "hardware", "started", "rate", "times_real"} <= set(found)
    assert list(found["policies"]) == ["slack", "least_requests", "clairvoyant"]
    figures = found["policies"]["slack"]
    assert {"met", "total", "wilson95"} <= set(figures["attainment"]["interactive"])
    assert set(figures["attainment"]) == {"interactive", "chat", "code", "batch"}
    for name in ("ttft_ms", "tpot_ms", "itl_ms"):
        assert set(figures[name]) == {"p50", "p90", "p99"}
    for name in ("goodput_rps", "output_tok_s", "batch_tok_s", "errors", "model_error"):
        assert name in figures
    assert len(figures["batch_jobs_done"]) == len(figures["windows"]) == 1
    for worker in figures["workers"].values():
        assert set(worker["coefficients_fitted"]) == set(worker["coefficients_true"])


def test_rate_and_batch_jobs(capsys: Said) -> None:
    half = document(f"{MINI} {LEAST} --rate 0.5 --batch-jobs 3", capsys)
    whole = document(f"{MINI} {LEAST} --batch-jobs 0", capsys)
    totals = [
        found["policies"]["least_requests"]["attainment"]["interactive"]["total"]
        for found in (half, whole)
    ]
    assert 0.35 * totals[1] < totals[0] < 0.65 * totals[1]
    assert half["policies"]["least_requests"]["attainment"]["batch"]["total"] == 3
    assert "batch" not in whole["policies"]["least_requests"]["attainment"]


def test_a_trace_of_ones_own(tmp_path: Path, capsys: Said) -> None:
    trace = tmp_path / "mine.csv"
    lines = [f"{1000 * n},{200 + n},20" for n in range(30)]
    trace.write_text("\n".join(["timestamp_ms,prompt_tokens,output_tokens", *lines]) + "\n")
    found = document(f"{MINI} {LEAST} --trace {trace} --batch-jobs 0", capsys)
    assert found["policies"]["least_requests"]["attainment"]["chat"]["total"] == 30


def test_a_policy_of_ones_own(capsys: Said) -> None:
    name = "splitserve.scheduling.policies.round_robin:RoundRobin"
    found = document(f"{MINI} --policy {name} --policy round_robin", capsys)["policies"]
    assert found[name] == found["round_robin"]


def test_fidelity(capsys: Said) -> None:
    found = document(f"--scenario fidelity-4090 --traces {TRACES}", capsys)
    assert set(found["error"]) == {"ttft", "tpot", "e2e"}
    assert abs(found["error"]["ttft"]) <= 0.10
    assert abs(found["error"]["tpot"]) <= 0.05
    assert abs(found["error"]["e2e"]) <= 0.05


def test_the_tables(capsys: Said) -> None:
    assert run(["simulate", *f"{MINI} --policy slack {LEAST}".split()]) == 0
    out = capsys.readouterr().out
    assert "mini-flood: 1 times the recorded rate, 1 windows, 120 batch jobs in each" in out
    assert "interactive %" in out
    assert "least_requests" in out
    assert run(["simulate", *f"--scenario fidelity-4090 --traces {TRACES}".split()]) == 0
    assert "real mean ms" in capsys.readouterr().out


def test_a_picture(tmp_path: Path, capsys: Said) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra `bench`")
    for kind, mark in (("svg", b"<?xml"), ("png", b"\x89PNG")):
        picture = tmp_path / f"x.{kind}"
        assert run(["simulate", *f"{MINI} {LEAST} --plot {picture}".split()]) == 0
        assert picture.read_bytes().startswith(mark)
    capsys.readouterr()
    assert run(["simulate", *f"{MINI} {LEAST} --plot {tmp_path}/x.what".split()]) == 1
    assert "x.what" in capsys.readouterr().err


def test_a_bound(capsys: Said) -> None:
    pytest.importorskip("scipy", reason="the bound needs the extra `bench`")
    found = document(f"{MINI} {LEAST} --bound --rate 3", capsys)
    share = found["bound"]["mean_of_windows"]
    count = found["policies"]["least_requests"]["attainment"]["interactive"]
    assert count["met"] / count["total"] <= share <= 1.0


@pytest.mark.parametrize("option,module", [("--bound", "scipy"), ("--plot x.png", "matplotlib")])
def test_an_extra_that_is_missing(
    option: str, module: str, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    found: Callable[..., object] = find_spec

    def without(name: str, *rest: Any) -> object:
        return None if name == module else found(name, *rest)

    monkeypatch.setattr("importlib.util.find_spec", without)
    assert run(["simulate", *f"{MINI} {LEAST} {option}".split()]) == 1
    said = capsys.readouterr().err
    assert f"needs {module}, which is not installed; pip install 'splitserve[bench]'" in said


@pytest.mark.parametrize(
    "arguments,said",
    [
        ("", "simulate takes --scenario NAME or -c FILE; scenarios are azure-flood"),
        (f"{MINI} --scenario azure-flood", "either --scenario or -c, not both"),
        ("--scenario azure-flod", "there is no such scenario; did you mean 'azure-flood'?"),
        ("--scenario zzz", "they are azure-flood, azure-flood-2p2d"),
        ("-c none.toml", "none.toml: there is no such file"),
        (f"-c {TRACES}/README.md", "README.md: "),
        (f"{MINI} --policy slak", "policy 'slak' is unknown; did you mean 'slack'?"),
        (f"{MINI} --policy no.such:Policy", "cannot be imported"),
        (f"{MINI} {LEAST} --rate 0", "--rate"),
        (f"{MINI} {LEAST} --batch-jobs -1", "--batch-jobs"),
        (f"{MINI} {LEAST} --window 9999", "nothing arrives in the window at 9999 s"),
        (f"{MINI} {LEAST} --trace none.csv", "none.csv: there is no such file"),
        (f"{MINI} {LEAST} --trace {TRACES}/README.md", "no known trace format"),
        ("--scenario azure-flood --traces nowhere", "--traces nowhere: there is no such folder"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(arguments: str, said: str, capsys: Said) -> None:
    assert run(["simulate", *arguments.split(), "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert said in captured.err


def test_where_traces_are_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Said
) -> None:
    cwd = tmp_path / "project"
    cwd.mkdir()
    monkeypatch.chdir(cwd)
    monkeypatch.delenv("SPLITSERVE_TRACES", raising=False)
    wanted = ["simulate", "--scenario", "fidelity-4090", "--json"]
    assert run(wanted) == 2
    assert "no folder of traces is known; give one with --traces" in capsys.readouterr().err
    monkeypatch.setenv("SPLITSERVE_TRACES", str(TRACES))
    assert run(wanted) == 0
    monkeypatch.delenv("SPLITSERVE_TRACES")
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "traces").symlink_to(TRACES)
    assert run(wanted) == 0


def test_a_picture_of_nothing_to_compare(tmp_path: Path, capsys: Said) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra `bench`")
    picture = tmp_path / "x.png"
    arguments = f"simulate --scenario fidelity-4090 --traces {TRACES} --plot {picture}"
    assert run(arguments.split()) == 2
    assert "compares no policies" in capsys.readouterr().err
