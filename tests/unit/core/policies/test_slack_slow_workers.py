"""A box that cannot meet a target even alone still serves, at once and whatever its role."""

from __future__ import annotations

import pytest

from splitserve import messages as m
from splitserve.scheduling import Scheduler
from splitserve.scheduling.policies.slack import Slack

TARGETS = m.Slo(ttft_s=1.0, tpot_s=0.05)


def worker(worker_id: str, role: m.Role, decode_tok_s: float) -> m.WorkerSnapshot:
    return m.WorkerSnapshot(
        worker_id,
        role,
        "fake",
        ("m",),
        connector="fake",
        pairing_key="k=1",
        max_running=8,
        prefill_tok_s=500.0,
        decode_tok_s=decode_tok_s,
    )


def ask(scheduler: Scheduler, **more: object) -> list[m.Command]:
    request = m.GenerateRequest("r", "m", 100, max_tokens=10, slo=TARGETS, **more)  # type: ignore[arg-type]
    return scheduler.step(m.RequestArrived(request), 1.0)


def fleet(*workers: m.WorkerSnapshot) -> Scheduler:
    scheduler = Scheduler(Slack())
    for each in workers:
        scheduler.step(m.WorkerReported(each), 0.0)
    return scheduler


def test_a_lone_slow_worker_serves() -> None:
    [start] = ask(fleet(worker("a", m.Role.AGGREGATED, 5.0)))
    assert isinstance(start, m.StartAggregated)


@pytest.mark.parametrize("decode_tok_s", [5.0, 19.0, 21.0, 100.0])
def test_a_slow_decode_worker_beside_a_fast_prefill_worker_serves(decode_tok_s: float) -> None:
    pair = (worker("p", m.Role.PREFILL, 100.0), worker("d", m.Role.DECODE, decode_tok_s))
    [split] = ask(fleet(*pair))
    assert isinstance(split, m.StartPrefill)
    [whole] = ask(fleet(*pair), forced_plan=m.PlanKind.AGGREGATED)
    assert isinstance(whole, m.StartAggregated)
    assert whole.worker_id == "d"


def test_what_is_late_already_is_not_held_back_by_its_own_target() -> None:
    scheduler = fleet(worker("a", m.Role.AGGREGATED, 25.0))
    started: list[m.StartAggregated] = []

    def take(commands: list[m.Command]) -> None:
        started.extend(c for c in commands if isinstance(c, m.StartAggregated))

    for number in range(12):
        request = m.GenerateRequest(f"r{number}", "m", 1500, max_tokens=10, slo=TARGETS)
        take(scheduler.step(m.RequestArrived(request), 1.0))
    now_s = 2.0
    for _ in range(12):
        assert started, "the rest waits for ever"
        command = started.pop(0)
        now_s += 3.0
        take(scheduler.step(m.FirstToken(command.request_id, command.attempt), now_s))
        finished = m.DecodeFinished(command.request_id, command.attempt, 1500, 0, 10)
        take(scheduler.step(finished, now_s + 0.5))
        take(scheduler.step(m.TimerFired(), now_s + 1.0))
    assert scheduler.live == 0
