"""Single decisions of the scheduler, each as one short story."""

from __future__ import annotations

from dataclasses import replace

import pytest

from splitserve import eventlog
from splitserve import messages as m
from splitserve.pairing import why_not_pair
from splitserve.performance.links import Links
from splitserve.scheduling import Scheduler, SchedulerLimits

KEY = "weights=1;dtype=float32"


def worker(worker_id: str, role: m.Role, **more: object) -> m.WorkerSnapshot:
    values: dict[str, object] = {
        "worker_id": worker_id,
        "role": role,
        "engine": "fake",
        "models": ("m",),
        "connector": "native",
        "pairing_key": KEY,
        "max_running": 4,
        **more,
    }
    return m.WorkerSnapshot(**values)  # type: ignore[arg-type]


def fleet(*workers: m.WorkerSnapshot, limits: SchedulerLimits | None = None) -> Scheduler:
    scheduler = Scheduler(limits=limits)
    for each in workers:
        scheduler.step(m.WorkerReported(each), 0.0)
    return scheduler


def arrive(scheduler: Scheduler, name: str = "r", **more: object) -> list[m.Command]:
    values: dict[str, object] = {"prompt_tokens": 100, "max_tokens": 10, **more}
    request = m.GenerateRequest(name, str(values.pop("model", "m")), **values)  # type: ignore[arg-type]
    return scheduler.step(m.RequestArrived(request), 1.0)


PREFILL = worker("p", m.Role.PREFILL)
DECODE = worker("d", m.Role.DECODE)
WHOLE = worker("a", m.Role.AGGREGATED)


def test_a_pair_splits_and_the_record_names_every_candidate() -> None:
    [start] = arrive(fleet(PREFILL, DECODE))
    assert isinstance(start, m.StartPrefill)
    assert (start.worker_id, start.decode_worker_id) == ("p", "d")
    why = {(c.prefill_worker, c.decode_worker): c.why_not for c in start.choice.candidates}
    assert why == {
        ("p", "p"): "its role is prefill",
        ("d", "d"): "its role is decode",
        ("p", "d"): "",
    }


def test_life_of_a_split_request() -> None:
    scheduler = fleet(PREFILL, DECODE)
    arrive(scheduler)
    handoff = m.Handoff("h", "p", "native", "x")
    assert scheduler.step(m.HandoffReady("r", 1, handoff), 1.1) == [
        m.StartDecode("r", 1, "d", handoff)
    ]
    assert scheduler.step(m.PrefillFinished("r", 1, 100, 0, 0.2), 1.3) == []
    assert scheduler.ledger.workers["p"].in_flight == 0
    assert scheduler.step(m.FirstToken("r", 1), 1.4) == [m.ReleaseKV(handoff, consumed=True)]
    assert scheduler.step(m.DecodeFinished("r", 1, 100, 0, 10), 2.4) == []
    assert scheduler.live == 0


def test_a_broken_handoff_is_run_whole_and_visibly() -> None:
    scheduler = fleet(PREFILL, DECODE)
    arrive(scheduler)
    handoff = m.Handoff("h", "p", "native")
    scheduler.step(m.HandoffReady("r", 1, handoff), 1.1)
    failed = m.LegFailed("r", 1, m.Leg.DECODE, "d", m.Failure.HANDOFF, "checksum")
    commands = scheduler.step(failed, 1.2)
    assert commands[:2] == [m.Cancel("r", 1, "p"), m.ReleaseKV(handoff, consumed=False)]
    assert isinstance(commands[2], m.StartAggregated)
    assert commands[2].attempt == 2


def test_a_retry_avoids_the_worker_that_failed() -> None:
    scheduler = fleet(WHOLE, worker("b", m.Role.AGGREGATED))
    [first] = arrive(scheduler)
    assert isinstance(first, m.StartAggregated)
    failed = m.LegFailed("r", 1, m.Leg.AGGREGATED, first.worker_id, m.Failure.UNREACHABLE)
    [second] = scheduler.step(failed, 1.1)
    assert isinstance(second, m.StartAggregated)
    assert second.worker_id != first.worker_id


def test_a_final_failure_is_not_retried() -> None:
    scheduler = fleet(WHOLE)
    arrive(scheduler)
    failed = m.LegFailed("r", 1, m.Leg.AGGREGATED, "a", m.Failure.REFUSED, "400", final=True)
    [reject] = scheduler.step(failed, 1.1)
    assert isinstance(reject, m.Reject)
    assert reject.refusal is m.Refusal.FAILED
    assert "a: 400" in reject.detail


def test_attempts_are_bounded() -> None:
    scheduler = fleet(WHOLE, limits=SchedulerLimits(attempts=3))
    arrive(scheduler)
    for attempt in (1, 2):
        failed = m.LegFailed("r", attempt, m.Leg.AGGREGATED, "a", m.Failure.UNREACHABLE)
        assert isinstance(scheduler.step(failed, 1.1)[0], m.StartAggregated)
    failed = m.LegFailed("r", 3, m.Leg.AGGREGATED, "a", m.Failure.UNREACHABLE)
    assert isinstance(scheduler.step(failed, 1.2)[0], m.Reject)


def test_after_the_first_token_nothing_is_retried() -> None:
    scheduler = fleet(WHOLE, worker("b", m.Role.AGGREGATED))
    arrive(scheduler)
    scheduler.step(m.FirstToken("r", 1), 1.1)
    [reject] = scheduler.step(
        m.LegFailed("r", 1, m.Leg.AGGREGATED, "a", m.Failure.BROKEN, "reset"), 1.2
    )
    assert isinstance(reject, m.Reject)
    assert reject.refusal is m.Refusal.BROKEN


def test_prefill_death_after_the_first_token_is_nobodys_loss() -> None:
    scheduler = fleet(PREFILL, DECODE)
    arrive(scheduler)
    scheduler.step(m.HandoffReady("r", 1, m.Handoff("h", "p", "native")), 1.1)
    scheduler.step(m.FirstToken("r", 1), 1.2)
    assert scheduler.step(m.WorkerLost("p", "killed"), 1.3) == []
    assert scheduler.live == 1


def test_a_full_fleet_queues_and_the_queue_is_bounded() -> None:
    only = worker("a", m.Role.AGGREGATED, max_running=1)
    scheduler = fleet(only, limits=SchedulerLimits(queue=1))
    assert isinstance(arrive(scheduler, "r1")[0], m.StartAggregated)
    assert arrive(scheduler, "r2") == [m.WakeAt(61.0)]
    [reject] = arrive(scheduler, "r3")
    assert isinstance(reject, m.Reject)
    assert reject.refusal is m.Refusal.QUEUE_FULL
    assert reject.retry_after_s
    [start] = scheduler.step(m.DecodeFinished("r1", 1), 2.0)
    assert isinstance(start, m.StartAggregated)
    assert start.request_id == "r2"


def test_a_request_that_waits_too_long_is_told_why() -> None:
    only = worker("a", m.Role.AGGREGATED, max_running=1)
    scheduler = fleet(only)
    arrive(scheduler, "r1")
    arrive(scheduler, "r2")
    [reject] = scheduler.step(m.TimerFired(), 61.0)
    assert isinstance(reject, m.Reject)
    assert reject.request_id == "r2"
    assert "full: 1 of 1" in reject.detail


@pytest.mark.parametrize(
    "workers, wish, refusal",
    [
        ((), {}, m.Refusal.UNKNOWN_MODEL),
        ((WHOLE,), {"model": "x"}, m.Refusal.UNKNOWN_MODEL),
        ((WHOLE,), {"forced_worker": "zz"}, m.Refusal.UNPLANNABLE),
        ((WHOLE,), {"forced_plan": m.PlanKind.DISAGGREGATED}, m.Refusal.UNPLANNABLE),
        (
            (PREFILL, DECODE),
            {"unsplittable": "several prompts", "forced_plan": m.PlanKind.DISAGGREGATED},
            m.Refusal.UNPLANNABLE,
        ),
    ],
)
def test_hopeless_requests_end_at_once(
    workers: tuple[m.WorkerSnapshot, ...], wish: dict[str, object], refusal: m.Refusal
) -> None:
    [reject] = arrive(fleet(*workers), **wish)  # type: ignore[arg-type]
    assert isinstance(reject, m.Reject)
    assert reject.refusal is refusal


def test_a_model_whose_workers_died_is_503_not_404() -> None:
    scheduler = fleet(WHOLE)
    scheduler.step(m.WorkerLost("a"), 0.5)
    [reject] = arrive(scheduler)
    assert isinstance(reject, m.Reject)
    assert reject.refusal is m.Refusal.NO_WORKER


def test_forced_aggregated_runs_whole_on_the_decode_worker() -> None:
    [start] = arrive(fleet(PREFILL, DECODE), forced_plan=m.PlanKind.AGGREGATED)
    assert isinstance(start, m.StartAggregated)
    assert start.worker_id == "d"


def test_unlike_workers_are_never_paired_and_the_reason_is_readable() -> None:
    odd = worker("d", m.Role.DECODE, pairing_key="weights=2;dtype=float32")
    assert why_not_pair(PREFILL, odd) == "KV differs in weights (1 / 2)"
    [start] = arrive(fleet(PREFILL, odd))
    assert isinstance(start, m.StartAggregated)
    assert why_not_pair(PREFILL, worker("d", m.Role.DECODE, connector="")).endswith("move KV")
    assert "itself" in why_not_pair(PREFILL, PREFILL)


def test_draining_workers_get_nothing_new() -> None:
    draining = worker("a", m.Role.AGGREGATED, draining=True)
    [start] = arrive(fleet(draining, worker("b", m.Role.AGGREGATED)))
    assert isinstance(start, m.StartAggregated)
    assert start.worker_id == "b"


def test_work_goes_where_least_is_predicted() -> None:
    fast = worker("fast", m.Role.AGGREGATED, prefill_tok_s=5000.0, decode_tok_s=100.0)
    slow = worker("slow", m.Role.AGGREGATED, prefill_tok_s=500.0, decode_tok_s=10.0)
    starts = [arrive(scheduler, "r")[0] for scheduler in (fleet(slow, fast), fleet(fast, slow))]
    assert [s.worker_id for s in starts if isinstance(s, m.StartAggregated)] == ["fast", "fast"]


def test_speeds_are_learnt_from_what_the_router_sees() -> None:
    scheduler = fleet(worker("a", m.Role.AGGREGATED, prefill_tok_s=100.0, decode_tok_s=5.0))
    model = scheduler.ledger.workers["a"].model
    now_s = 10.0
    for number in range(60):
        name = f"r{number}"
        request = m.GenerateRequest(name, "m", 400 + 20 * number, max_tokens=10)
        scheduler.step(m.RequestArrived(request), now_s)
        now_s += request.prompt_tokens / 1000
        scheduler.step(m.FirstToken(name, 1), now_s)
        for token in range(2, 11):
            now_s += 0.02
            scheduler.step(m.StreamsAdvanced(((name, 1, token, now_s),)), now_s)
        scheduler.step(m.DecodeFinished(name, 1, request.prompt_tokens, 0, 10), now_s)
    assert model.prefill_s(2000, 2e6, 0, 0) == pytest.approx(2.0, rel=0.1)
    assert model.decode_step_s(1, 1000) == pytest.approx(0.02, rel=0.1)


def test_links_are_learnt_from_handoffs() -> None:
    links = Links()
    assert links.transfer_s("p", "d", 100e6) == pytest.approx(1.01)
    for _ in range(20):
        links.of("p", "d").see(1 << 30, 1.0)
    assert links.transfer_s("p", "d", 1 << 30) == pytest.approx(1.01, rel=0.01)
    links.begin("p", "d", 1 << 30)
    assert links.transfer_s("p", "x", 0) > 5  # behind what leaves p, at the assumed rate
    links.end("p", "d", 1 << 30)
    links.forget("d")
    assert not links.pairs.get(("p", "d"))


@pytest.mark.parametrize("line", ["", "{", "[]", '{"event":"No","now_s":1}', '{"now_s":1}'])
def test_a_broken_log_line_names_itself(line: str) -> None:
    with pytest.raises(eventlog.EventLogError, match="line 7"):
        eventlog.decode(line, 7)


def test_events_survive_the_log() -> None:
    slo = m.Slo(0.1, None, 3.0)
    request = m.GenerateRequest(
        "r", "m", 5, slo=slo, block_hashes=(1, 2), forced_plan=m.PlanKind.DISAGGREGATED
    )
    for event in (m.RequestArrived(request), m.WorkerReported(PREFILL), m.TimerFired()):
        assert eventlog.decode(eventlog.encode(0.1 + 0.2, event)) == (0.1 + 0.2, event)


def test_what_a_workers_cache_has_lost_is_not_counted_on() -> None:
    scheduler = fleet(WHOLE)
    arrive(scheduler, block_hashes=(1, 2, 3), prompt_tokens=1600)
    prefix = scheduler._desk.prefix
    assert prefix.match("a", (1, 2, 3)) == 3
    for removed_tokens, left in ((500, 3), (600, 2), (1000, 2), (1100, 1)):
        report = replace(WHOLE, cache_removed_tokens=removed_tokens)
        scheduler.step(m.WorkerReported(report), 2.0)
        assert prefix.match("a", (1, 2, 3)) == left
    scheduler.step(m.WorkerReported(replace(WHOLE, cache_cleared=1)), 3.0)
    assert prefix.match("a", (1, 2, 3)) == 0
