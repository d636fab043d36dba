"""Workers whose engine takes one side of hand-offs and answers nothing alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from splitserve import messages as m
from splitserve.scheduling import Scheduler, SchedulerLimits
from splitserve.scheduling.policies.catalog import by_name

POLICIES = ("slack", "least_work", "round_robin", "static_pd")


def worker(worker_id: str, role: m.Role, **more: object) -> m.WorkerSnapshot:
    values: dict[str, object] = {"connector": "c", "splits_only": True, **more}
    return m.WorkerSnapshot(worker_id, role, "fake", ("m",), **values)  # type: ignore[arg-type]


PREFILL = worker("p", m.Role.PREFILL)
DECODE = worker("d", m.Role.DECODE)
OTHER_PREFILL = worker("p2", m.Role.PREFILL)
WHOLE = worker("w", m.Role.AGGREGATED, connector="", splits_only=False)
PREFILL_THAT_CAN = worker("pw", m.Role.PREFILL, connector="other", splits_only=False)
Make = Callable[..., Scheduler]


@pytest.fixture(params=POLICIES)
def make(request: pytest.FixtureRequest) -> Make:
    def fleet(*workers: m.WorkerSnapshot, **limits: float) -> Scheduler:
        bounds = SchedulerLimits(**limits)  # type: ignore[arg-type]
        scheduler = Scheduler(by_name(request.param), bounds)
        for each in workers:
            scheduler.step(m.WorkerReported(each), 0.0)
        return scheduler

    return fleet


def arrive(scheduler: Scheduler, **more: object) -> list[m.Command]:
    values: dict[str, object] = {"max_tokens": 10, "slo": m.Slo(ttft_s=5.0), **more}
    request = m.GenerateRequest("r", "m", 100, **values)  # type: ignore[arg-type]
    commands = scheduler.step(m.RequestArrived(request), 1.0)
    return [c for c in commands if not isinstance(c, m.WakeAt)]


def fail(scheduler: Scheduler, leg: m.Leg, worker_id: str, failure: m.Failure) -> list[m.Command]:
    attempt = next(iter(scheduler._desk.flights.values())).attempt
    commands = scheduler.step(m.LegFailed("r", attempt, leg, worker_id, failure), 2.0)
    return [c for c in commands if not isinstance(c, m.WakeAt)]


def test_a_pair_serves(make: Make) -> None:
    (start,) = arrive(make(PREFILL, DECODE))
    assert isinstance(start, m.StartPrefill)
    assert (start.worker_id, start.decode_worker_id) == ("p", "d")


@pytest.mark.parametrize("alone", [PREFILL, DECODE], ids=["prefill", "decode"])
def test_one_side_alone_serves_nothing_and_its_partner_may_come(
    make: Make, alone: m.WorkerSnapshot
) -> None:
    scheduler = make(alone, max_wait_s=10.0)
    assert arrive(scheduler) == []
    partner = DECODE if alone is PREFILL else PREFILL
    started = scheduler.step(m.WorkerReported(partner), 2.0)
    assert [type(c) for c in started if not isinstance(c, m.WakeAt)] == [m.StartPrefill]


def test_a_request_that_waits_in_vain_is_told_why(make: Make) -> None:
    scheduler = make(DECODE, max_wait_s=10.0)
    arrive(scheduler)
    (reject,) = (c for c in scheduler.step(m.TimerFired(), 12.0) if isinstance(c, m.Reject))
    assert reject.refusal is m.Refusal.NO_WORKER
    assert "its engine serves nothing whole" in reject.detail


def test_what_cannot_be_split_is_refused_at_once(make: Make) -> None:
    (reject,) = arrive(make(PREFILL, DECODE), unsplittable="echo wants it whole")
    assert isinstance(reject, m.Reject)
    assert reject.refusal is m.Refusal.UNPLANNABLE
    assert "(echo wants it whole)" in reject.detail


def test_what_cannot_be_split_goes_to_who_can(make: Make) -> None:
    for able in (WHOLE, PREFILL_THAT_CAN):
        (start,) = arrive(make(PREFILL, DECODE, able), unsplittable="echo wants it whole")
        assert isinstance(start, m.StartAggregated)
        assert start.worker_id == able.worker_id


def test_several_prompts_are_split_where_nobody_is_left_to_take_them_whole(make: Make) -> None:
    several = {"unsplittable": "several prompts in one body", "several_prompts": True}
    (start,) = arrive(make(PREFILL, DECODE), **several)
    assert isinstance(start, m.StartPrefill)
    (start,) = arrive(make(PREFILL, DECODE, WHOLE), **several)
    assert isinstance(start, m.StartAggregated)


@pytest.mark.parametrize(
    "leg, worker_id, failure",
    [
        (m.Leg.PREFILL, "p", m.Failure.REFUSED),
        (m.Leg.PREFILL, "p", m.Failure.HANDOFF),
        (m.Leg.DECODE, "d", m.Failure.HANDOFF),
        (m.Leg.DECODE, "d", m.Failure.UNREACHABLE),
    ],
)
def test_the_only_pair_is_tried_again(
    make: Make, leg: m.Leg, worker_id: str, failure: m.Failure
) -> None:
    scheduler = make(PREFILL, DECODE)
    arrive(scheduler)
    handoff = m.Handoff("h", "p", "c")
    scheduler.step(m.HandoffReady("r", 1, handoff), 1.1)
    commands = fail(scheduler, leg, worker_id, failure)
    other = "d" if worker_id == "p" else "p"
    assert m.Cancel("r", 1, other) in commands  # who would wait for a partner in vain
    assert m.ReleaseKV(handoff, consumed=False) in commands
    again = commands[-1]
    assert isinstance(again, m.StartPrefill)
    assert (again.attempt, again.worker_id, again.decode_worker_id) == (2, "p", "d")


def test_another_partner_is_preferred_to_one_that_failed(make: Make) -> None:
    scheduler = make(PREFILL, DECODE, OTHER_PREFILL)
    (start,) = arrive(scheduler)
    assert isinstance(start, m.StartPrefill)
    again = fail(scheduler, m.Leg.PREFILL, start.worker_id, m.Failure.REFUSED)[-1]
    assert isinstance(again, m.StartPrefill)
    assert {start.worker_id, again.worker_id} == {"p", "p2"}


def test_a_failed_hand_off_runs_whole_where_that_is_possible(make: Make) -> None:
    scheduler = make(PREFILL, DECODE, PREFILL_THAT_CAN)
    (start,) = arrive(scheduler)
    assert isinstance(start, m.StartPrefill)
    again = fail(scheduler, m.Leg.PREFILL, "p", m.Failure.HANDOFF)[-1]
    assert isinstance(again, m.StartAggregated)
    assert again.worker_id == "pw"


def test_a_forced_whole_plan_is_refused(make: Make) -> None:
    (reject,) = arrive(make(PREFILL, DECODE), forced_plan=m.PlanKind.AGGREGATED)
    assert isinstance(reject, m.Reject)
    assert reject.refusal is m.Refusal.UNPLANNABLE
