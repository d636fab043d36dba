"""Soft roles: clearly better, twice in a row, never an empty side, no flapping on a step."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from splitserve import messages as m
from splitserve.performance.coefficients import KNOWN
from splitserve.planning import roles as planning
from splitserve.planning.what_if import ArrivalMemory, Fleet, goodput, proposals
from splitserve.simulation.trace import TraceRequest

SPEED = replace(KNOWN["rtx4090-llama-3.1-8b"], budget_tokens=512)


def fleet(count: int = 4, role: m.Role = m.Role.AUTO) -> Fleet:
    workers = tuple(
        m.WorkerSnapshot(
            f"w{n}",
            role,
            "sim",
            ("m",),
            connector="sim",
            pairing_key="k=1",
            max_running=256,
            kv_capacity_tokens=41_408,
            kv_bytes_per_token=131_072,
        )
        for n in range(count)
    )
    return Fleet(workers, {w.worker_id: SPEED for w in workers}, 25e9 / 8)


def load(rate: float, prompt: int, output: int, seconds: float = 60.0) -> list[TraceRequest]:
    draw = random.Random(7)
    slo = m.Slo(ttft_s=1.0 + 2e-4 * prompt, tpot_s=0.05)
    at_s, found = 0.0, []
    while (at_s := at_s + draw.expovariate(rate)) < seconds:
        found.append(TraceRequest(at_s, prompt, output, "chat", slo))
    return found


def test_proposals_never_empty_a_side() -> None:
    for count in range(6):
        for roles in proposals(fleet(count)):
            kinds = set(roles.values())
            assert kinds <= {m.Role.AUTO} or kinds == {m.Role.PREFILL, m.Role.DECODE}
    assert len(list(proposals(fleet(4)))) == 3


def test_workers_with_a_fixed_role_are_left_alone() -> None:
    assert list(proposals(fleet(4, m.Role.DECODE))) == [{}]


def test_the_trace_is_what_arrived() -> None:
    memory = ArrivalMemory(limit=3)
    for number in range(5):
        memory.arrived(m.GenerateRequest(f"r{number}", "m", 100 + number), float(number))
    memory.finished("r4", 7)
    trace = memory.trace()
    assert [(t.at_s, t.prompt_tokens, t.output_tokens) for t in trace] == [
        (0.0, 102, 7), (1.0, 103, 7), (2.0, 104, 7),
    ]  # fmt: skip
    memory.arrived(m.GenerateRequest("late", "m", 1), 1000.0)
    assert len(memory.trace()) == 1


def test_goodput_of_an_easy_load_is_full() -> None:
    assert goodput(fleet(), load(1.0, 500, 50), {}) == pytest.approx(1.0)
    assert goodput(fleet(), [], {}) == 1.0


def reviews(monkeypatch: pytest.MonkeyPatch, gains: list[float]) -> list[dict[str, m.Role] | None]:
    planner = planning.RolePlanner()
    adopted = []
    for gain in gains:

        def told(_: Fleet, __: object, roles: dict[str, m.Role], gain: float = gain) -> float:
            prefills = sum(role is m.Role.PREFILL for role in roles.values())
            return {0: 0.80, 1: 0.80 + gain, 2: 0.70}[prefills]

        monkeypatch.setattr(planning, "goodput", told)
        adopted.append(planner.review(fleet(), load(2.0, 500, 50)).adopted)
    return adopted


def test_a_gain_must_be_clear_and_seen_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reviews(monkeypatch, [0.01, 0.01, 0.01]) == [None, None, None]
    once, twice = reviews(monkeypatch, [0.05, 0.05])
    assert once is None
    assert twice is not None
    assert sum(role is m.Role.PREFILL for role in twice.values()) == 1


def test_a_passing_bump_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reviews(monkeypatch, [0.05, 0.0, 0.05, 0.0]) == [None] * 4


def test_too_few_requests_plan_nothing() -> None:
    review = planning.RolePlanner().review(fleet(), load(0.1, 500, 50))
    assert review.adopted is None
    assert "too few" in review.reason


def test_a_step_load_does_not_flap() -> None:
    """Low load, then four times as much, then low again: at most one change each way."""
    planner, changes = planning.RolePlanner(), 0
    for rate in (1.0, 1.0, 4.0, 4.0, 4.0, 4.0, 1.0, 1.0, 1.0):
        changes += planner.review(fleet(), load(rate, 1500, 100, 30.0)).adopted is not None
    assert changes <= 2
