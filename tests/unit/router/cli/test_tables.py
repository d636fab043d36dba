"""Decision records and measurements as people read them."""

import io
import sys
import types

import pytest
from rich.console import Console

from router.cli.commands import run
from router.cli.decision import candidates_table, outcome_table, summary

PAIR = {
    "plan": "disaggregated",
    "workers": {"prefill": "p1", "decode": "d1"},
    "predicted_ttft_ms": 100.04,
    "predicted_tpot_ms": 20.0,
    "transfer_ms": 12.5,
    "feasible": True,
    "why_not": None,
}
WHOLE = {
    **PAIR,
    "plan": "aggregated",
    "workers": {"aggregated": "d1"},
    "feasible": False,
    "why_not": "its role is decode",
}
RECORD = {
    "request_id": "r-1",
    "class": "interactive",
    "targets": {"ttft_ms": 1000.0, "tpot_ms": None, "deadline_ms": None},
    "prompt_tokens": 45,
    "cached_tokens": 16,
    "candidates": [WHOLE, PAIR],
    "chosen": PAIR,
    "released_ms": 0.2,
    "actual": {
        "ttft_ms": 130.1,
        "tpot_ms": None,
        "prefill_ms": 90.0,
        "transfer_ms": 3.25,
        "transfer_bytes": 2_410_000,
        "output_tokens": 1,
        "finish": "done",
        "met_targets": True,
    },
}


def drawn(*parts: object) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(*parts)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def row(text: str, start: str) -> list[str]:
    return next(line.split("  ") for line in text.splitlines() if line.startswith(start))


def test_the_outcome_names_both_workers_with_predicted_and_actual() -> None:
    console = Console(file=io.StringIO())
    text = drawn(outcome_table(console, RECORD))
    assert [part.strip() for part in row(text, "prefill") if part] == ["prefill", "p1", "90.0"]
    handoff = " ".join(row(text, "KV hand-off, 2.41 MB"))
    assert "p1 -> d1" in handoff
    assert handoff.split()[-2:] == ["12.5", "3.2"]
    assert " ".join(row(text, "first token")).split()[-2:] == ["100.0", "130.1"]
    assert " ".join(row(text, "decode")).split()[-3:] == ["d1", "20.0", "-"]


def test_an_unsplit_request_has_no_hand_off() -> None:
    console = Console(file=io.StringIO())
    text = drawn(outcome_table(console, {**RECORD, "chosen": WHOLE}))
    assert "hand-off" not in text
    assert "d1" in " ".join(row(text, "prefill"))


def test_a_refused_request_has_a_record_too() -> None:
    console = Console(file=io.StringIO())
    refused = {**RECORD, "chosen": None, "candidates": [], "actual": {}, "released_ms": None}
    assert "nobody" in drawn(outcome_table(console, refused))
    assert "running" in summary(refused)


def test_every_candidate_says_chosen_or_why_not() -> None:
    console = Console(file=io.StringIO())
    text = drawn(candidates_table(console, RECORD))
    assert " ".join(row(text, "aggregated")).rstrip().endswith("its role is decode")
    assert " ".join(row(text, "disaggregated")).rstrip().endswith("chosen")


def test_the_summary_tells_targets() -> None:
    assert summary(RECORD) == (
        "request r-1: class interactive, 45 prompt tokens (16 cached), 1 output tokens, done, "
        "targets (ttft 1000 ms) met"
    )


def measured() -> dict[str, object]:
    sys.stdout.write("progress of a library\n")
    return {
        "seed": 0,
        "systems": {"ours": {"cpu_ms": {"plain": 0.123456}}, "theirs": {"cpu_ms": {"x": 2}}},
    }


@pytest.fixture
def bench_module(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("benchmarks.relay")
    module.run = measured  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "benchmarks.relay", module)


@pytest.mark.usefixtures("bench_module")
def test_bench_json_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    import json

    assert run(["bench", "relay", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["systems"]["ours"]["cpu_ms"]["plain"] == 0.123456
    assert captured.err == "progress of a library\n"


@pytest.mark.usefixtures("bench_module")
def test_bench_tables_put_systems_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "relay"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["relay", "ours", "theirs"]
    assert ["cpu_ms.plain", "0.1235", "-"] in [line.split() for line in lines]
    assert ["cpu_ms.x", "-", "2"] in [line.split() for line in lines]
    assert ["seed", "0"] in [line.split() for line in lines]


def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "benchmarks.relay", None)
    assert run(["bench", "relay"]) == 1
    assert "pip install 'splitserve[native,bench]'" in capsys.readouterr().err
