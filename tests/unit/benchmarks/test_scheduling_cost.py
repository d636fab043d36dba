"""The cost benchmark measures what it says: a full fleet, a queue, every kind of event."""

from __future__ import annotations

import pytest

from benchmarks.scheduling_cost import decision_cost, simulation_speed


@pytest.mark.parametrize("kind", ["interactive", "batch"])
def test_a_small_fleet(kind: str) -> None:
    found = decision_cost(2, 40, kind, events=100)
    assert found["running"] >= 2 * 10
    assert found["waiting"] >= 10, "a queue that is gone costs nothing"
    assert found["decisions"] >= 50
    assert 0 < found["decision_ms"]["p50"] <= found["decision_ms"]["p99"]
    assert {"RequestArrived", "StreamsAdvanced"} <= set(found["by_event_ms"])


def test_simulation_runs_faster_than_real_time() -> None:
    found = simulation_speed(length_s=20.0)
    assert found["times_real"] > 5
    assert 0 < found["attainment"] <= 1
