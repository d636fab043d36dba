"""The scheduler's promises, whatever the order of events.

A machine plays the edge: it may answer, fail, repeat, reorder and lose things in any order, as a
real fleet does. After every step it checks the three promises of `Scheduler`.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from splitserve import eventlog
from splitserve import messages as m
from splitserve.scheduling import Scheduler, SchedulerLimits

ROLES = st.sampled_from(list(m.Role))


def snapshot(number: int, role: m.Role, max_running: int, key: str) -> m.WorkerSnapshot:
    return m.WorkerSnapshot(
        worker_id=f"w{number}",
        role=role,
        engine="fake",
        models=("m",) if number % 4 else ("m", "other"),
        connector="fake",
        pairing_key=f"weights={key}",
        max_running=max_running,
        kv_capacity_tokens=2000,
        kv_bytes_per_token=1000,
    )


class Fleet(RuleBasedStateMachine):
    """An adversarial edge. `legs` holds every leg that was ordered and has not been ended."""

    def __init__(self) -> None:
        super().__init__()
        self.limits = SchedulerLimits(queue=6, attempts=3, max_wait_s=30.0)
        self.scheduler = Scheduler(limits=self.limits)
        self.now_s = 0.0
        self.log: list[str] = []
        self.said: list[list[str]] = []
        self.arrived: list[str] = []
        self.ended: Counter[str] = Counter()
        self.handoffs: dict[str, m.Handoff] = {}
        self.released: Counter[str] = Counter()
        self.legs: dict[tuple[str, int, m.Leg], str] = {}
        self.stale: list[tuple[str, int]] = []
        self.max_running: dict[str, int] = {}

    # --- the edge -------------------------------------------------------------------------------

    def send(self, event: m.Event) -> None:
        self.now_s += 0.01
        self.log.append(eventlog.encode(self.now_s, event))
        commands = self.scheduler.step(event, self.now_s)
        self.said.append([eventlog.encode_command(c) for c in commands])
        for command in commands:
            self.obey(command)

    def obey(self, command: m.Command) -> None:
        match command:
            case m.StartAggregated(request_id, attempt, worker_id):
                self.order(request_id, attempt, m.Leg.AGGREGATED, worker_id)
            case m.StartPrefill(request_id, attempt, worker_id, decode):
                quarantined = self.scheduler.ledger.pairs.quarantined
                assert (worker_id, decode) not in quarantined
                self.order(request_id, attempt, m.Leg.PREFILL, worker_id)
            case m.StartDecode(request_id, attempt, worker_id, handoff):
                assert not self.released[handoff.handoff_id], "decode of a released hand-off"
                self.order(request_id, attempt, m.Leg.DECODE, worker_id)
            case m.Cancel(request_id, attempt, worker_id):
                for leg in m.Leg:
                    if self.legs.get((request_id, attempt, leg)) == worker_id:
                        del self.legs[request_id, attempt, leg]
            case m.ReleaseKV(handoff):
                self.released[handoff.handoff_id] += 1
            case m.Reject(request_id):
                self.end(request_id)
            case _:
                pass

    def order(self, request_id: str, attempt: int, leg: m.Leg, worker_id: str) -> None:
        assert not self.ended[request_id], "a leg of a request that has ended"
        assert attempt <= self.limits.attempts
        self.legs[request_id, attempt, leg] = worker_id
        self.stale.append((request_id, attempt))

    def end(self, request_id: str) -> None:
        self.ended[request_id] += 1
        for key in [key for key in self.legs if key[0] == request_id]:
            del self.legs[key]

    # --- what may happen ------------------------------------------------------------------------

    @initialize(role=ROLES)
    def first_worker(self, role: m.Role) -> None:
        self.report(1, role, 2, "a")

    @rule(number=st.integers(1, 5), role=ROLES, limit=st.integers(1, 3), key=st.sampled_from("ab"))
    def report(self, number: int, role: m.Role, limit: int, key: str) -> None:
        worker = snapshot(number, role, limit, key)
        booked = self.scheduler.ledger.workers.get(worker.worker_id)
        running = booked.in_flight if booked else 0
        self.max_running[worker.worker_id] = max(limit, running)
        self.send(m.WorkerReported(worker))

    @rule(number=st.integers(1, 5))
    def lose_worker(self, number: int) -> None:
        self.send(m.WorkerLost(f"w{number}", "test"))
        self.max_running.pop(f"w{number}", None)
        for key in [key for key, worker in self.legs.items() if worker == f"w{number}"]:
            del self.legs[key]

    @rule(
        pair=st.tuples(st.integers(1, 5), st.integers(1, 5)),
        reason=st.sampled_from(["", "odd text", "computed again"]),
        seconds=st.sampled_from([0.05, 6.0]),
    )
    def judge_pair(self, pair: tuple[int, int], reason: str, seconds: float) -> None:
        prefill, decode = (f"w{number}" for number in pair)
        self.send(m.PairJudged(prefill, decode, reason, self.now_s + seconds))

    @rule(
        tokens=st.integers(1, 900),
        model=st.sampled_from(["m", "m", "m", "other", "nobody"]),
        plan=st.sampled_from([None, None, None, *m.PlanKind]),
        worker=st.sampled_from([None, None, None, "w1", "w9"]),
        whole=st.sampled_from(["", "", "several prompts"]),
    )
    def arrive(
        self, tokens: int, model: str, plan: m.PlanKind | None, worker: str | None, whole: str
    ) -> None:
        request_id = f"r{len(self.arrived)}"
        self.arrived.append(request_id)
        self.send(
            m.RequestArrived(
                m.GenerateRequest(
                    request_id,
                    model,
                    tokens,
                    max_tokens=16,
                    forced_plan=plan,
                    forced_worker=worker,
                    unsplittable=whole,
                )
            )
        )

    @rule(data=st.data())
    def handoff_ready(self, data: st.DataObject) -> None:
        keys = [key for key in self.legs if key[2] is m.Leg.PREFILL]
        keys += [(request, attempt, m.Leg.PREFILL) for request, attempt in self.stale[-3:]]
        if not keys:
            return
        request_id, attempt, _ = data.draw(st.sampled_from(keys))
        handoff = m.Handoff(f"h{len(self.handoffs)}", "w", "fake")
        self.handoffs[handoff.handoff_id] = handoff
        self.send(m.HandoffReady(request_id, attempt, handoff))

    @rule(data=st.data(), what=st.sampled_from(["prefilled", "token", "done", "fail", "refuse"]))
    def leg_event(self, data: st.DataObject, what: str) -> None:
        keys = list(self.legs) + [(r, a, m.Leg.DECODE) for r, a in self.stale[-2:]]
        if not keys:
            return
        request_id, attempt, leg = data.draw(st.sampled_from(keys))
        live = self.legs.get((request_id, attempt, leg))
        if what == "prefilled":
            self.send(m.PrefillFinished(request_id, attempt, 100, 10, 0.1))
        elif what == "token" and leg is not m.Leg.PREFILL:
            self.send(m.FirstToken(request_id, attempt, 1 << 20, 0.01))
        elif what == "done" and leg is not m.Leg.PREFILL:
            answering = ((request_id, attempt, each) in self.legs for each in m.Leg)
            if any(list(answering)[1:]):
                self.end(request_id)
            self.send(m.DecodeFinished(request_id, attempt, 100, 0, 5))
        elif what in ("fail", "refuse"):
            self.legs.pop((request_id, attempt, leg), None)
            failure = m.Failure.HANDOFF if leg is m.Leg.DECODE else m.Failure.UNREACHABLE
            self.send(
                m.LegFailed(
                    request_id, attempt, leg, live or "w", failure, "x", final=what == "refuse"
                )
            )

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.arrived:
            request_id = data.draw(st.sampled_from(self.arrived[-6:]))
            if not self.ended[request_id]:
                self.end(request_id)
            self.send(m.RequestCancelled(request_id))

    @rule(seconds=st.sampled_from([0.1, 5.0, 31.0]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.send(m.TimerFired())

    # --- what must hold -------------------------------------------------------------------------

    @invariant()
    def ends_once(self) -> None:
        assert all(count == 1 for count in self.ended.values() if count)
        live = len(self.arrived) - sum(self.ended.values())
        assert self.scheduler.live == live

    @invariant()
    def released_at_most_once(self) -> None:
        assert all(count <= 1 for count in self.released.values())

    @invariant()
    def no_worker_over_its_limit(self) -> None:
        for worker_id, account in self.scheduler.ledger.workers.items():
            assert account.in_flight <= self.max_running[worker_id], worker_id
            assert account.pending_prefill_tokens >= 0
            assert account.booked_kv_tokens >= 0

    def teardown(self) -> None:
        """End everything; then nothing may be held, and a replay must say the same."""
        for request_id in self.arrived:
            if not self.ended[request_id]:
                self.end(request_id)
                self.send(m.RequestCancelled(request_id))
        assert self.scheduler.live == self.scheduler.queued == 0
        assert set(self.handoffs) == {h for h, count in self.released.items() if count == 1}
        for account in self.scheduler.ledger.workers.values():
            assert account.in_flight == account.booked_kv_tokens == 0
            assert account.pending_prefill_tokens == 0
        fresh = Scheduler(limits=self.limits)
        again = [
            [eventlog.encode_command(c) for c in commands]
            for commands in eventlog.replay(self.log, fresh)
        ]
        assert again == self.said


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
