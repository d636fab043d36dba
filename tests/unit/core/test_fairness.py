"""Tenants: a counter grows by what was used, divided by the tenant's weight."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest

from splitserve import messages as m
from splitserve.scheduling import Scheduler
from splitserve.scheduling.fairness import Fairness, TenantQueues
from splitserve.scheduling.flight import Flight
from splitserve.scheduling.policies.slack import Slack

PLAN = m.Candidate(m.PlanKind.AGGREGATED, "a", "a", 0.0, 0.0)


def flight(tenant: str, weight: float = 1.0, limit: int | None = 100, name: str = "r") -> Flight:
    request = m.GenerateRequest(
        name, "m", 1000, max_tokens=limit, tenant=tenant, tenant_weight=weight
    )
    return Flight(request, 0.0)


def started(fairness: Fairness, each: Flight) -> None:
    """What a policy and its desk do, in their order."""
    fairness.served(each.request, PLAN)
    each.attempt += 1


@dataclass
class Head:
    deadline_s: float
    flight: Flight


def test_a_counter_is_charged_in_advance_and_settled_with_what_was_used() -> None:
    fairness, one = Fairness(), flight("a", weight=2.0)
    fairness.arrived(one.request, 0.0)
    started(fairness, one)
    assert fairness.counter("a") == (1000 + 2 * 100) / 2
    fairness.settle(one, 400, 30)
    assert fairness.counter("a") == (400 + 2 * 30) / 2


def test_a_request_started_twice_is_charged_once_in_the_end() -> None:
    fairness, one = Fairness(), flight("a")
    fairness.arrived(one.request, 0.0)
    started(fairness, one)
    started(fairness, one)  # its batch piece was taken back, or a worker failed it
    fairness.settle(one, 1000, 10)
    assert fairness.counter("a") == 1000 + 2 * 10


def test_a_limit_far_too_high_is_not_held_against_its_tenant() -> None:
    fairness = Fairness()
    flights = [flight("a", limit=100_000), flight("b", limit=None)]
    for each in flights:
        fairness.arrived(each.request, 0.0)
    for each in flights:
        started(fairness, each)
    assert fairness.counter("a") == 1000 + 2 * 1024
    assert fairness.counter("b") == 1000 + 2 * 256


@pytest.mark.parametrize("weight", [1.0, 3.0, 0.5])
def test_queues_take_turns_by_weight(weight: float) -> None:
    fairness = Fairness()
    queues = TenantQueues(fairness)
    for number in range(200):
        for tenant, share in (("a", 1.0), ("b", weight)):
            each = flight(tenant, share, name=f"{tenant}{number}")
            fairness.arrived(each.request, 0.0)
            queues.add(each)
    turns: Counter[str] = Counter()
    for _ in range(120):
        first = queues.first()
        assert first is not None
        queues.take(first)
        started(fairness, first)
        fairness.settle(first, 1000, 50)
        turns[first.request.tenant] += 1
    assert turns["b"] / turns["a"] == pytest.approx(weight, rel=0.1)


def test_heads_of_the_tenant_with_the_larger_share_left_go_first() -> None:
    fairness = Fairness()
    heads = [Head(9.0, flight("a", 1.0)), Head(9.5, flight("b", 4.0))]
    for head in heads:
        fairness.arrived(head.flight.request, 0.0)
    for head in heads:
        started(fairness, head.flight)
    assert [h.flight.request.tenant for h in fairness.order(heads, 0.0, 8)] == ["b", "a"]


def test_guaranteed_rate_grows_with_the_weight() -> None:
    """Two tenants in a hurry have used up the same; only the heavier one is inside its rate."""
    fairness = Fairness()
    light, heavy = flight("light", 1.0), flight("heavy", 4.0)
    for each in (light, heavy):
        fairness.arrived(each.request, 0.0)
        for _ in range(250):  # 300 000 tokens
            started(fairness, each)
    urgent = [Head(0.05, light), Head(0.06, heavy)]
    relaxed = Head(50.0, flight("idle"))
    fairness.arrived(relaxed.flight.request, 0.0)
    ordered = fairness.order([*urgent, relaxed], 0.0, 8)
    assert ordered[0] is urgent[1]


class Settling(Slack):
    """SLACK, and a note of what it was told at the end of requests."""

    def __init__(self) -> None:
        super().__init__()
        self.told: dict[str, tuple[int, int]] = {}

    def ended(self, flight: Flight, prompt_tokens: int, output_tokens: int) -> None:
        assert flight.request.request_id not in self.told, "settled twice"
        self.told[flight.request.request_id] = prompt_tokens, output_tokens
        self._fairness.settle(flight, prompt_tokens, output_tokens)

    def counter(self, tenant: str) -> float:
        return self._fairness.counter(tenant)


WHOLE = m.WorkerSnapshot("a", m.Role.AGGREGATED, "fake", ("m",), max_running=1)


def ask(scheduler: Scheduler, name: str, tenant: str = "t", weight: float = 1.0) -> None:
    request = m.GenerateRequest(
        name,
        "m",
        1000,
        max_tokens=100,
        tenant=tenant,
        tenant_weight=weight,
        slo=m.Slo(deadline_s=86_400.0),
    )
    scheduler.step(m.RequestArrived(request), 1.0)


@pytest.fixture
def settling() -> Settling:
    return Settling()


@pytest.fixture
def scheduler(settling: Settling) -> Scheduler:
    scheduler = Scheduler(settling)
    scheduler.step(m.WorkerReported(WHOLE), 0.0)
    return scheduler


def test_the_engines_own_counts_are_settled(scheduler: Scheduler, settling: Settling) -> None:
    ask(scheduler, "r")
    scheduler.step(m.DecodeFinished("r", 1, 900, 200, 33), 2.0)
    assert settling.told == {"r": (700, 33)}
    assert settling.counter("t") == 700 + 2 * 33


def test_a_client_that_leaves_pays_for_what_it_heard(
    scheduler: Scheduler, settling: Settling
) -> None:
    ask(scheduler, "r")
    scheduler.step(m.FirstToken("r", 1), 1.5)
    scheduler.step(m.StreamsAdvanced((("r", 1, 7, 1.9),)), 2.0)
    scheduler.step(m.RequestCancelled("r"), 2.1)
    assert settling.told == {"r": (1000, 7)}


def test_a_request_that_never_started_is_not_settled(
    scheduler: Scheduler, settling: Settling
) -> None:
    ask(scheduler, "r1")
    ask(scheduler, "r2")  # waits
    scheduler.step(m.RequestCancelled("r2"), 2.0)
    assert settling.told == {}


def test_a_workers_failure_is_not_on_the_tenants_account(
    scheduler: Scheduler, settling: Settling
) -> None:
    ask(scheduler, "r")
    failed = m.LegFailed("r", 1, m.Leg.AGGREGATED, "a", m.Failure.REFUSED, "500", final=True)
    scheduler.step(failed, 2.0)
    assert settling.told == {"r": (0, 0)}
    assert settling.counter("t") == 0


def test_after_a_handoff_the_whole_prompt_was_computed() -> None:
    settling = Settling()
    scheduler = Scheduler(settling)
    for name, role in (("p", m.Role.PREFILL), ("d", m.Role.DECODE)):
        scheduler.step(
            m.WorkerReported(m.WorkerSnapshot(name, role, "fake", ("m",), "native", "k")), 0.0
        )
    ask(scheduler, "r")
    scheduler.step(m.HandoffReady("r", 1, m.Handoff("h", "p", "native")), 1.1)
    scheduler.step(m.DecodeFinished("r", 1, 1000, 1000, 5), 2.0)
    assert settling.told == {"r": (1000, 5)}


def test_weights_decide_who_is_served_under_load(scheduler: Scheduler) -> None:
    """One worker, one request at a time, two tenants that always wait: three turns to one."""
    for number in range(60):
        ask(scheduler, f"a{number}", "a", 1.0)
        ask(scheduler, f"b{number}", "b", 3.0)
    served: Counter[str] = Counter()
    running = "a0"
    for number in range(60):
        commands = scheduler.step(m.DecodeFinished(running, 1, 1000, 0, 20), 2.0 + number)
        [running] = [c.request_id for c in commands if isinstance(c, m.StartAggregated)]
        served[running[0]] += 1
    assert served["b"] / served["a"] == pytest.approx(3, rel=0.15)
