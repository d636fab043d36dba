"""The promise: an interactive arrival never waits behind batch for more than one bounded piece.

With exact coefficients and no noise, its time to first token with any backlog exceeds that without
by at most F_w(beta, Z_beta | N, K) + one step, beta being the longest batch prompt, which goes
whole; and its own prompt is computed beside the batch that decodes: F(U | N, K) - F(U | 0, 0)
more, in which n may be a step larger because streams take their share of each step's budget.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from splitserve import messages as m
from splitserve.performance.coefficients import KNOWN, area
from splitserve.scheduling import Scheduler, SchedulerLimits
from splitserve.scheduling.policies.slack import Slack
from splitserve.simulation.driver import SimulatedWorker, Simulation, World
from splitserve.simulation.engine import EngineShape
from splitserve.simulation.trace import TraceRequest

SPEED = replace(KNOWN["rtx4090-llama-3.1-8b"], budget_tokens=512)
KV_TOKENS = 41_408
TARGETS = m.Slo(ttft_s=2.0, tpot_s=0.05)
BATCH = m.Slo(deadline_s=86_400.0)
EDGE_S = 0.01  # dispatch and reporting delays of the simulated edge, both ways


def world(workers: int) -> World:
    def worker(number: int) -> SimulatedWorker:
        snapshot = m.WorkerSnapshot(
            f"w{number}",
            m.Role.AUTO,
            "sim",
            ("m",),
            max_running=10_000,
            kv_capacity_tokens=KV_TOKENS,
            coefficients=SPEED,
            exact=True,
        )
        return SimulatedWorker(snapshot, EngineShape(KV_TOKENS), SPEED)

    return World(tuple(worker(n) for n in range(workers)), step_noise=0.0)


def ttfts(arrivals: list[TraceRequest], batch: list[TraceRequest], workers: int) -> list[float]:
    limits = SchedulerLimits(queue=200_000, max_wait_s=1e6)
    simulation = Simulation(Scheduler(Slack(), limits), world(workers))
    check = watch_pieces(simulation)
    trace = sorted([*batch, *arrivals], key=lambda r: r.at_s)
    outcomes = simulation.run(trace, until_s=40.0, on_time=check)
    mine = [o for o in outcomes if o.trace.service_class == "chat"]
    assert all(o.ttft_s is not None for o in mine), "an interactive request got no answer"
    return [o.ttft_s for o in mine if o.ttft_s is not None]


def watch_pieces(simulation: Simulation) -> Callable[[float], None]:
    """P1: at no time has a worker more than one unanswered batch piece, or too much batch KV."""

    def check(_: float) -> None:
        for account in simulation.scheduler.ledger.workers.values():
            assert account.batch_pending <= 1
            assert account.batch_kv_tokens <= 0.6 * KV_TOKENS

    return check


def bound_s(batch: list[TraceRequest], prompt: int) -> float:
    beta = max((job.prompt_tokens for job in batch), default=0)
    # The most that can decode beside it without breaking the guards: KV full, step at its limit.
    streams = 64
    piece_s = SPEED.prefill_s(beta, area(beta, 0), streams, KV_TOKENS)
    alone_s = SPEED.prefill_s(prompt, area(prompt, 0), 0, 0)
    own_s = SPEED.prefill_s(prompt, area(prompt, 0), streams, KV_TOKENS) - alone_s
    return piece_s + SPEED.decode_step_s(streams, KV_TOKENS) + own_s + EDGE_S


def spaced(prompts: list[int]) -> list[TraceRequest]:
    return [
        TraceRequest(3.0 + 4.0 * number, prompt, 20, "chat", TARGETS)
        for number, prompt in enumerate(prompts)
    ]


def backlog(jobs: int, prompt: int) -> list[TraceRequest]:
    return [
        TraceRequest(0.001 * (number % 1000), prompt, 150, "batch", BATCH) for number in range(jobs)
    ]


@given(
    jobs=st.integers(0, 200),
    batch_prompt=st.integers(1, 4000),
    prompts=st.lists(st.integers(1, 5000), min_size=1, max_size=4),
    workers=st.integers(1, 2),
)
@example(jobs=80, batch_prompt=420, prompts=[1, 1006], workers=1)  # a third step beside 36 streams
@settings(max_examples=60, deadline=None)
def test_batch_delays_an_arrival_by_one_piece_at_most(
    jobs: int, batch_prompt: int, prompts: list[int], workers: int
) -> None:
    arrivals, batch = spaced(prompts), backlog(jobs, batch_prompt)
    without = ttfts(arrivals, [], workers)
    with_batch = ttfts(arrivals, batch, workers)
    for arrival, alone_s, beside_s in zip(arrivals, without, with_batch, strict=True):
        assert beside_s - alone_s <= bound_s(batch, arrival.prompt_tokens)


@pytest.mark.parametrize("jobs", [1_000, 10_000, 100_000])
def test_the_size_of_the_backlog_does_not_matter(jobs: int) -> None:
    arrivals = spaced([200, 3000, 800, 1500])
    batch = backlog(jobs, 2500)
    without = ttfts(arrivals, [], 2)
    with_batch = ttfts(arrivals, batch, 2)
    for arrival, alone_s, beside_s in zip(arrivals, without, with_batch, strict=True):
        assert beside_s - alone_s <= bound_s(batch, arrival.prompt_tokens)
