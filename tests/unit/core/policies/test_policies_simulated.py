"""Every policy drives the simulator: nothing is lost, nothing ends twice, a rerun is the same."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from splitserve import eventlog
from splitserve import messages as m
from splitserve.performance.coefficients import Coefficients
from splitserve.scheduling import Scheduler, SchedulerLimits
from splitserve.scheduling.policies.catalog import by_name, names
from splitserve.simulation.driver import Simulation
from splitserve.simulation.job import EngineShape
from splitserve.simulation.results import Outcome
from splitserve.simulation.trace import TraceRequest
from splitserve.simulation.world import SimulatedWorker, World

SPEED = Coefficients(16.3e-3, 0.050e-3, 1.72e-7, 16.3e-3, 0.0767e-3, 5.45e-9, 512)
KV_TOKENS = 12_000
CHAT = m.Slo(ttft_s=1.5, tpot_s=0.05)
BATCH = m.Slo(deadline_s=86_400.0)
AUTO, PREFILL, DECODE = m.Role.AUTO, m.Role.PREFILL, m.Role.DECODE
FLEETS = {
    "alone": ((AUTO,), ""),
    "whole": ((AUTO, AUTO, AUTO), ""),
    "mixed": ((AUTO, AUTO, AUTO), "native"),
    "split": ((PREFILL, PREFILL, DECODE, DECODE), "native"),
}
EVERY = (
    *names(),
    "static-pd:1000",
    "dynamo:pools",
    "capped:3",
    "own_policy_example:MostCached",
)
GUARDED = ("slack", "edf-guarded")


class Witness(Scheduler):
    """Counts how each request ends, and keeps what was said."""

    ends: Counter[str]
    said: list[m.Command]

    def step(self, event: m.Event, now_s: float) -> list[m.Command]:
        if isinstance(event, m.DecodeFinished | m.RequestCancelled):
            self.ends[event.request_id] += 1
        commands = super().step(event, now_s)
        self.ends.update(c.request_id for c in commands if isinstance(c, m.Reject))
        self.said += commands
        return commands


def trace() -> list[TraceRequest]:
    """Chat in bursts on five prompts that begin alike, and a dump of batch jobs."""
    requests = []
    for number in range(40):
        shared = tuple(range(number % 5 * 10, number % 5 * 10 + 3))
        prompt_tokens = 512 * 3 + 37 * (number % 7) if number % 2 else 40 + 90 * (number % 9)
        hashes = shared if number % 2 else ()
        at_s = 0.3 * (number // 4)
        requests.append(
            TraceRequest(at_s, prompt_tokens, 1 + number % 30, "chat", CHAT, hashes, tenant="t")
        )
    batch = [TraceRequest(0.5, 900 + 50 * n, 30, "batch", BATCH) for n in range(12)]
    return sorted([*requests, *batch], key=lambda r: r.at_s)


def play(policy: str, fleet: str) -> tuple[Witness, list[Outcome]]:
    roles, connector = FLEETS[fleet]
    workers = []
    for number, role in enumerate(roles):
        snapshot = m.WorkerSnapshot(
            f"w{number}",
            role,
            "sim",
            ("m",),
            connector=connector,
            max_running=64,
            kv_capacity_tokens=KV_TOKENS,
            kv_bytes_per_token=131_072,
            coefficients=SPEED,
        )
        workers.append(SimulatedWorker(snapshot, EngineShape(KV_TOKENS), SPEED))
    witness = Witness(by_name(policy), SchedulerLimits(max_wait_s=1e6))
    witness.ends, witness.said = Counter(), []
    outcomes = Simulation(witness, World(tuple(workers), seed=3)).run(trace())
    return witness, outcomes


@pytest.fixture(autouse=True)
def own_policies_are_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).resolve().parent)


@pytest.mark.parametrize("fleet", FLEETS)
@pytest.mark.parametrize("policy", EVERY)
def test_every_request_ends_once(policy: str, fleet: str) -> None:
    witness, outcomes = play(policy, fleet)
    asked = trace()
    assert len(outcomes) == len(asked)
    assert all(o.done != o.rejected for o in outcomes)
    if policy != "conductor":  # it refuses what would be late
        assert all(o.done for o in outcomes)
    assert set(witness.ends.values()) == {1}
    assert len(witness.ends) == len(asked)
    assert witness.live == witness.queued == 0
    for account in witness.ledger.workers.values():
        assert account.bookings == {}
        assert account.booked_kv_tokens == account.pending_prefill_tokens == 0
    starts = [c for c in witness.said if isinstance(c, m.StartAggregated | m.StartPrefill)]
    assert all(s.choice.chosen is not None and s.choice.chosen.feasible for s in starts)
    if fleet in ("alone", "whole"):
        assert all(isinstance(s, m.StartAggregated) for s in starts)
    if fleet == "split" and policy not in GUARDED:  # those run batch whole, where it hurts least
        assert all(isinstance(s, m.StartPrefill) for s in starts)


@pytest.mark.parametrize("policy", EVERY)
def test_the_same_run_says_the_same(policy: str) -> None:
    first, second = (
        [eventlog.encode_command(c) for c in play(policy, "mixed")[0].said] for _ in range(2)
    )
    assert first == second
    assert len(first) > 50


WISHES: tuple[tuple[m.PlanKind | None, str | None], ...] = (
    (None, "w1"),
    (m.PlanKind.AGGREGATED, None),
    (None, None),
)


@pytest.mark.parametrize("policy", EVERY)
@pytest.mark.parametrize("plan,worker", WISHES)
def test_wishes_are_granted(policy: str, plan: m.PlanKind | None, worker: str | None) -> None:
    """A forced worker or plan is obeyed, and a draining worker gets nothing."""
    scheduler = Scheduler(by_name(policy))
    for number in range(3):
        snapshot = m.WorkerSnapshot(
            f"w{number}", AUTO, "sim", ("m",), draining=number == 2, coefficients=SPEED
        )
        scheduler.step(m.WorkerReported(snapshot), 0.0)
    for number in range(3):
        request = m.GenerateRequest(
            f"r{number}", "m", 100, 10, slo=CHAT, forced_plan=plan, forced_worker=worker
        )
        [start] = scheduler.step(m.RequestArrived(request), 0.1 * number)
        assert isinstance(start, m.StartAggregated)
        assert start.worker_id in ({worker} if worker else {"w0", "w1"})
