"""Whole simulations: every request ends once, whatever dies, and nothing stays booked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve import messages as m
from splitserve.performance.coefficients import KNOWN
from splitserve.scheduling import Scheduler, SchedulerLimits
from splitserve.scheduling.policies import Policy
from splitserve.scheduling.policies.least_work import LeastWork
from splitserve.scheduling.policies.slack import Slack
from splitserve.simulation.driver import SimulatedWorker, Simulation, World
from splitserve.simulation.engine import EngineShape
from splitserve.simulation.results import Outcome
from splitserve.simulation.trace import TraceRequest
from splitserve.simulation.world import LinkFault, WorkerFault

SPEED = replace(KNOWN["rtx4090-llama-3.1-8b"], budget_tokens=512)
KV_TOKENS = 4_000
TARGETS = m.Slo(ttft_s=2.0, tpot_s=0.1)
BATCH = m.Slo(deadline_s=86_400.0)
LIMITS = SchedulerLimits(queue=10_000, max_wait_s=60.0)


def worker(name: str, role: m.Role = m.Role.AUTO, kv_tokens: int = KV_TOKENS) -> SimulatedWorker:
    snapshot = m.WorkerSnapshot(
        name,
        role,
        "sim",
        ("m",),
        connector="sim",
        max_running=10_000,
        kv_capacity_tokens=kv_tokens,
        kv_bytes_per_token=131_072,
        coefficients=SPEED,
    )
    return SimulatedWorker(snapshot, EngineShape(kv_tokens, 32), SPEED)


def fleet(split: bool, **changes: object) -> World:
    roles = (m.Role.PREFILL, m.Role.DECODE, m.Role.DECODE) if split else (m.Role.AUTO,) * 3
    workers = tuple(worker(f"w{number}", role) for number, role in enumerate(roles))
    return replace(World(workers, step_noise=0.0), **changes)  # type: ignore[arg-type]


def play(
    world: World, trace: list[TraceRequest], policy: Policy | None = None
) -> tuple[Simulation, list[Outcome]]:
    simulation = Simulation(Scheduler(policy or Slack(), LIMITS), world)
    outcomes = simulation.run(trace, on_time=memory_holds(simulation))
    return simulation, outcomes


def memory_holds(simulation: Simulation) -> Callable[[float], None]:
    def check(_: float) -> None:
        for engine in simulation.engines.values():
            assert 0 <= engine.kv_used_tokens <= engine.shape.kv_tokens

    return check


def assert_all_over(simulation: Simulation, outcomes: list[Outcome], requests: int) -> None:
    assert len(outcomes) == requests
    for outcome in outcomes:
        assert outcome.done != outcome.rejected, "answered, or refused, and not both"
        if outcome.done:
            assert outcome.output_tokens == outcome.trace.output_tokens
            assert outcome.first_token_s is not None
            assert outcome.last_token_s is not None
            assert outcome.arrived_s < outcome.first_token_s <= outcome.last_token_s
            assert len(list(outcome.gaps_s())) == outcome.output_tokens - 1
    for engine in simulation.engines.values():
        assert engine.used_blocks == engine.running == engine.waiting == engine.decoding == 0
    assert simulation.scheduler.live == 0
    for account in simulation.scheduler.ledger.workers.values():
        assert account.in_flight == account.streams_soon == account.kv_soon_tokens == 0


requests = st.builds(
    TraceRequest,
    at_s=st.floats(0, 20),
    prompt_tokens=st.integers(1, 2500),
    output_tokens=st.integers(1, 120),
    slo=st.sampled_from([TARGETS, BATCH]),
)


def back_s(at_s: float, lasts_s: float | None) -> float | None:
    return None if lasts_s is None else at_s + lasts_s


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """A fleet, split or not, in which workers die and links are cut, for a while or for good."""
    lasting = st.one_of(st.none(), st.floats(0.1, 10))
    moments = st.tuples(st.floats(0, 25), lasting)
    deaths = draw(st.dictionaries(st.sampled_from(["w0", "w1", "w2"]), moments, max_size=2))
    cuts = draw(st.lists(moments, max_size=2))
    return fleet(
        draw(st.booleans()),
        snapshot_s=draw(st.sampled_from([0.0, 1.0])),
        worker_faults=tuple(
            WorkerFault(name, at_s, back_s(at_s, lasts_s))
            for name, (at_s, lasts_s) in deaths.items()
        ),
        link_faults=tuple(
            LinkFault("w0", f"w{1 + number}", at_s, back_s(at_s, lasts_s))
            for number, (at_s, lasts_s) in enumerate(cuts)
        ),
    )


@given(world=worlds(), trace=st.lists(requests, min_size=1, max_size=25), simple=st.booleans())
@settings(max_examples=60, deadline=None)
def test_every_request_ends_once_whatever_dies(
    world: World, trace: list[TraceRequest], simple: bool
) -> None:
    ordered = sorted(trace, key=lambda r: r.at_s)
    simulation, outcomes = play(world, ordered, LeastWork() if simple else Slack())
    assert_all_over(simulation, outcomes, len(ordered))


def test_a_request_survives_the_death_of_its_worker() -> None:
    long = TraceRequest(0.0, 2400, 50, slo=TARGETS)
    world = replace(World((worker("w0"), worker("w1")), step_noise=0.0))
    _, (undisturbed,) = play(world, [long])
    assert undisturbed.ttft_s is not None
    dying = replace(world, worker_faults=(WorkerFault("w0", undisturbed.ttft_s / 2),))
    simulation, outcomes = play(dying, [long])
    assert_all_over(simulation, outcomes, 1)
    assert outcomes[0].done
    assert outcomes[0].ttft_s is not None
    assert outcomes[0].ttft_s > undisturbed.ttft_s * 1.2
    assert set(simulation.scheduler.ledger.workers) == {"w1"}


def test_a_stream_does_not_survive_it() -> None:
    world = World((worker("w0"),), step_noise=0.0, worker_faults=(WorkerFault("w0", 1.0, 2.0),))
    trace = [TraceRequest(0.0, 100, 500, slo=TARGETS), TraceRequest(3.0, 100, 5, slo=TARGETS)]
    simulation, (broken, later) = play(world, trace)
    assert broken.refusal is m.Refusal.BROKEN
    assert broken.first_token_s is not None
    assert not broken.good
    assert later.good, "the worker came back"
    assert_all_over(simulation, [broken, later], 2)


def test_a_cut_link_makes_a_split_request_run_whole() -> None:
    world = fleet(True, link_faults=(LinkFault("w0", "w1", 0.0), LinkFault("w0", "w2", 0.0)))
    simulation, outcomes = play(world, [TraceRequest(0.0, 2000, 20, slo=TARGETS)], LeastWork())
    assert_all_over(simulation, outcomes, 1)
    assert outcomes[0].plan is m.PlanKind.AGGREGATED


def test_a_split_request_holds_memory_on_both_ends_until_the_kv_is_across() -> None:
    world = fleet(True, link_bytes_s=131_072 * 2000.0)  # a second for its 2,000 tokens
    simulation = Simulation(Scheduler(LeastWork(), LIMITS), world)
    held: list[tuple[int, int]] = []

    def watch(_: float) -> None:
        engines = simulation.engines
        decode = max(engines["w1"].kv_used_tokens, engines["w2"].kv_used_tokens)
        held.append((engines["w0"].kv_used_tokens, decode))

    (outcome,) = simulation.run([TraceRequest(0.0, 2000, 200, slo=TARGETS)], on_time=watch)
    assert outcome.plan is m.PlanKind.DISAGGREGATED
    assert outcome.transfer_s == pytest.approx(1.0 + world.link_latency_s)
    assert any(prefill >= 2000 and decode >= 2000 for prefill, decode in held)
    assert any(prefill == 0 and decode >= 2000 for prefill, decode in held)


def test_transfers_that_share_an_end_wait_for_each_other() -> None:
    world = fleet(True, link_bytes_s=131_072 * 1000.0)
    together = [TraceRequest(0.0, 1000, 5, slo=TARGETS)] * 2
    _, outcomes = play(world, together, LeastWork())
    first_s, second_s = sorted(o.first_token_s or 0.0 for o in outcomes)
    assert second_s - first_s > 0.9, "one second each, one after the other"


def test_turns_of_a_session_wait_for_the_one_before_and_for_the_user() -> None:
    def turn(prompt: int, after_s: float) -> TraceRequest:
        blocks = tuple(range(prompt // 512))
        return TraceRequest(1.0, prompt, 40, "chat", TARGETS, blocks, "s", after_s=after_s)

    session = [turn(600, 0.0), turn(1200, 2.5), turn(1800, 0.0)]
    simulation, outcomes = play(World((worker("w0"),), step_noise=0.0), session)
    assert_all_over(simulation, outcomes, 3)
    assert outcomes[0].arrived_s == 1.0
    assert outcomes[1].arrived_s == pytest.approx((outcomes[0].last_token_s or 0.0) + 2.5)
    assert outcomes[2].arrived_s == pytest.approx(outcomes[1].last_token_s)


def test_a_prompt_seen_before_is_not_computed_again() -> None:
    blocks = tuple(range(4))
    one = TraceRequest(0.0, 2048, 2, slo=TARGETS, block_hashes=blocks)
    _, (cold, warm) = play(
        World((worker("w0"),), step_noise=0.0), [one, replace(one, at_s=5.0)], LeastWork()
    )
    assert cold.ttft_s is not None
    assert warm.ttft_s is not None
    assert warm.ttft_s < 0.2 * cold.ttft_s


def test_what_no_engine_can_hold_is_refused() -> None:
    huge = TraceRequest(0.0, KV_TOKENS + 1, 5, slo=TARGETS)
    simulation, (outcome,) = play(World((worker("w0"),)), [huge])
    assert outcome.refusal is m.Refusal.FAILED
    assert_all_over(simulation, [outcome], 1)


def test_engine_priority_lets_interactive_requests_pass_batch() -> None:
    jobs = [TraceRequest(0.0, 1000, 20, "batch", BATCH)] * 12
    mine = TraceRequest(0.5, 100, 5, slo=TARGETS)

    def ttft_s(priority: bool) -> float:
        plain = worker("w0")
        untold = replace(plain.snapshot, kv_capacity_tokens=0)  # else the router queues, in order
        shaped = replace(plain, snapshot=untold, shape=replace(plain.shape, priority=priority))
        _, outcomes = play(World((shaped,), step_noise=0.0), [*jobs, mine], LeastWork())
        assert outcomes[-1].ttft_s is not None
        return outcomes[-1].ttft_s

    assert ttft_s(True) < 0.5 * ttft_s(False)
