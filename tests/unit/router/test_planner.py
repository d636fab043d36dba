"""The slow loop at the edge: whose role it may choose, and what becomes of its choice."""

from __future__ import annotations

from router.dispatch import Dispatcher
from router.origin import parse_origin
from router.planner import Planner
from router.registry import Member, Registry
from router.telemetry.metrics import RouterMetrics
from router.telemetry.records import RecordStore
from router.upstream import HttpUpstream
from router.wire import Deadlines
from splitserve import messages as m
from splitserve.scheduling import Scheduler


class Stage:
    """A registry whose members are put in by hand, and a planner on it."""

    def __init__(self, *roles: m.Role) -> None:
        self.now_s = 0.0
        self.dispatcher = Dispatcher(
            Scheduler(), lambda: self.now_s, RecordStore(), RouterMetrics()
        )
        self.registry = Registry(
            self.dispatcher, HttpUpstream(), interval_s=1.0, deadlines=Deadlines()
        )
        for number, role in enumerate(roles):
            self.join(f"w{number}", role)
        self.planner = Planner(self.dispatcher, self.registry)

    def join(self, worker_id: str, role: m.Role) -> None:
        member = Member(worker_id, parse_origin(f"http://127.0.0.1:{9000 + len(worker_id)}"), role)
        self.registry.members[worker_id] = member
        snapshot = m.WorkerSnapshot(
            worker_id, role, "fake", ("m",), connector="fake", pairing_key="k=1",
            kv_bytes_per_token=1000,
        )  # fmt: skip
        self.registry._report(member, snapshot)

    def roles(self) -> dict[str, tuple[m.Role, bool]]:
        accounts = self.dispatcher.scheduler.ledger.workers
        return {w: (a.snapshot.role, a.snapshot.soft_role) for w, a in accounts.items()}

    def ask(self, count: int) -> None:
        for number in range(count):
            self.now_s += 0.5
            slo = m.Slo(ttft_s=1.0, tpot_s=0.05)
            request = m.GenerateRequest(f"r{number}", "m", 300, max_tokens=20, slo=slo)
            self.dispatcher.tell(m.RequestArrived(request))
            self.dispatcher.tell(m.FirstToken(f"r{number}", 1))
            self.now_s += 0.5
            self.dispatcher.tell(m.DecodeFinished(f"r{number}", 1, 300, 0, 20))


async def test_nothing_is_planned_without_auto_workers() -> None:
    stage = Stage(m.Role.AGGREGATED, m.Role.AGGREGATED, m.Role.AUTO)
    assert await stage.planner.review_once() is None


async def test_a_review_runs_in_its_own_process_and_says_why() -> None:
    stage = Stage(m.Role.AUTO, m.Role.AUTO)
    stage.ask(40)
    review = await stage.planner.review_once()
    assert review is not None
    assert len(review.considered) == 2
    assert review.adopted is None  # an easy load: no choice is two points better
    assert "asked for" in review.reason


async def test_what_is_adopted_is_a_bias_of_auto_workers_only() -> None:
    stage = Stage(m.Role.AUTO, m.Role.AUTO, m.Role.AGGREGATED)
    stage.registry.assign("w0", m.Role.PREFILL)
    stage.registry.assign("w1", m.Role.DECODE)
    stage.registry.assign("w2", m.Role.PREFILL)  # declared: not ours
    assert stage.roles() == {
        "w0": (m.Role.PREFILL, True),
        "w1": (m.Role.DECODE, True),
        "w2": (m.Role.AGGREGATED, False),
    }
    fleet = stage.planner._fleet()
    assert [w.role for w in fleet.workers] == [m.Role.AUTO, m.Role.AUTO, m.Role.AGGREGATED]
    stage.registry.assign("w0", m.Role.AUTO)
    assert stage.roles()["w0"] == (m.Role.AUTO, True)


async def test_a_role_declared_by_hand_ends_the_planners_choice() -> None:
    stage = Stage(m.Role.AUTO, m.Role.AUTO)
    stage.registry.assign("w0", m.Role.PREFILL)
    stage.registry.update("w0", role=m.Role.DECODE)
    assert stage.roles()["w0"] == (m.Role.DECODE, False)
    stage.registry.assign("w0", m.Role.PREFILL)
    assert stage.roles()["w0"] == (m.Role.DECODE, False)
