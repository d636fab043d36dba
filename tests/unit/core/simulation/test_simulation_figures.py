"""Intervals, percentiles and sums over windows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.messages import Refusal, Slo
from splitserve.simulation.figures import WindowFigures, attainment, figures
from splitserve.simulation.results import Outcome, jain, percentiles, wilson95, worst_tenth
from splitserve.simulation.trace import TraceRequest

GROUPS = {"interactive": ("chat", "code")}


@pytest.mark.parametrize(
    "met,total,low,high",
    [(0, 0, 0.0, 1.0), (10, 10, 0.7225, 1.0), (0, 10, 0.0, 0.2775), (81, 263, 0.2553, 0.3662)],
)
def test_wilson_against_published_values(met: int, total: int, low: float, high: float) -> None:
    assert wilson95(met, total) == pytest.approx((low, high), abs=5e-4)


@given(total=st.integers(1, 5000), share=st.floats(0, 1))
def test_the_interval_holds_the_share(total: int, share: float) -> None:
    met = round(share * total)
    low, high = wilson95(met, total)
    assert 0 <= low <= met / total + 1e-12
    assert met / total - 1e-12 <= high <= 1


def test_percentiles_are_nearest_ranks() -> None:
    values = [float(n) for n in range(100, 0, -1)]
    assert percentiles(values) == {"p50": 50.0, "p90": 90.0, "p99": 99.0}
    assert percentiles([7.0]) == {"p50": 7.0, "p90": 7.0, "p99": 7.0}
    assert percentiles([]) == {"p50": None, "p90": None, "p99": None}


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60))
def test_a_percentile_has_that_share_at_or_below_it(values: Sequence[float]) -> None:
    found = percentiles(values)
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        edge = found[name]
        assert edge is not None
        assert sum(v <= edge for v in values) >= share * len(values)
        assert sum(v < edge for v in values) < share * len(values) or math.isclose(edge, values[0])


def test_worst_tenth() -> None:
    assert worst_tenth([]) is None
    assert worst_tenth([3.0, 1.0]) == 3.0
    assert worst_tenth([float(n) for n in range(30)]) == pytest.approx((29 + 28 + 27) / 3)


def test_jain() -> None:
    assert jain([5.0, 5.0, 5.0]) == pytest.approx(1.0)
    assert jain([9.0, 0.0, 0.0]) == pytest.approx(1 / 3)
    assert jain([]) == jain([0.0]) == 1.0


def outcome(
    kind: str = "chat",
    arrived_s: float = 0.0,
    ttft_s: float | None = 0.1,
    gap_s: float = 0.02,
    output: int = 11,
) -> Outcome:
    slo = Slo(deadline_s=86400.0) if kind == "batch" else Slo(0.5, 0.05)
    found = Outcome(TraceRequest(arrived_s, 100, output, kind, slo), arrived_s)
    if ttft_s is not None:
        first_s = arrived_s + ttft_s
        found.first_token_s = first_s
        found.step_ends_s = [first_s + n * gap_s for n in range(output)]
        found.bursts = ((1, output),)
        found.last_token_s = found.step_ends_s[-1]
        found.output_tokens = output
    return found


def test_good_means_every_target() -> None:
    assert outcome().good
    assert not outcome(ttft_s=0.51).good
    assert not outcome(gap_s=0.06).good
    assert not outcome(ttft_s=None).good
    assert outcome(output=1, gap_s=9.0).good, "TPOT does not apply to one token"
    late = outcome()
    late.trace = TraceRequest(0.0, 1, 11, slo=Slo(deadline_s=0.2))
    assert not late.good


def test_gaps_leave_out_the_steps_that_gave_nothing() -> None:
    found = outcome()
    found.step_ends_s = [1.0, 2.0, 4.0, 7.0, 11.0]
    found.bursts = ((1, 2), (5, 5))  # preempted after its second token
    assert list(found.gaps_s()) == [1.0, 9.0]


def test_figures_of_two_windows() -> None:
    first = WindowFigures(300, 1, 240, 200)
    for each in (outcome(), outcome(ttft_s=0.9), outcome("code"), outcome("batch")):
        first.see(each)
    first.see(outcome(arrived_s=220.0))  # after the scored part: served, not counted
    second = WindowFigures(1200, 2, 240, 200)
    refused = outcome(ttft_s=None)
    refused.refusal = Refusal.NO_WORKER
    for each in (refused, outcome("batch", ttft_s=None)):
        second.see(each)
    found = figures([first, second], GROUPS)
    assert found["goodput_rps"] == round(2 / 400, 4)
    assert found["mean_of_windows"] == round((2 / 3 + 0) / 2, 4)
    counts = {n: (c["met"], c["total"]) for n, c in found["attainment"].items()}
    assert counts == {"interactive": (2, 4), "chat": (1, 3), "code": (1, 1), "batch": (1, 2)}
    assert found["batch_jobs_done"] == [1, 0]
    assert found["errors"] == 1
    assert found["output_tok_s"] == round(5 * 11 / 480, 2)
    assert found["batch_tok_s"] == round(11 / 480, 2)
    assert found["itl_ms"] == {"p50": 20.0, "p90": 20.0, "p99": 20.0}
    assert found["tpot_ms"]["p50"] == 20.0
    assert [w["attainment"]["interactive"]["total"] for w in found["windows"]] == [3, 1]


def test_a_group_counts_its_classes() -> None:
    window = WindowFigures(0, 1, 10, 10)
    window.see(outcome("code"))
    assert attainment([window], GROUPS)["interactive"]["total"] == 1
