"""The virtual clock: engines, links and clients around the very same Scheduler.

The driver plays the router's Dispatcher: it carries out Commands after a dispatch delay, and tells
Events after a reporting delay, so the scheduler sees the world as late as a live one does.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from splitserve import messages as m
from splitserve.scheduling import Scheduler
from splitserve.simulation.clock import Clock
from splitserve.simulation.engine import SimulatedEngine
from splitserve.simulation.host import Host
from splitserve.simulation.job import Job, StepResult
from splitserve.simulation.network import Network
from splitserve.simulation.results import Outcome
from splitserve.simulation.trace import TraceRequest
from splitserve.simulation.world import LinkFault, SimulatedWorker, WorkerFault, World

__all__ = ["SimulatedWorker", "Simulation", "World"]

MODEL = "m"  # the name of the one model that simulated workers serve
_BATCH_PRIORITY = 10

_RunKey = tuple[str, int, m.Leg]


@dataclass(eq=False, slots=True)
class _Live:
    """A request that has arrived and not ended."""

    request_id: str
    trace: TraceRequest
    outcome: Outcome


@dataclass(eq=False, slots=True)
class _Run:
    """One leg on one machine."""

    live: _Live
    host: Host
    job: Job
    handoff: m.Handoff | None = None
    moved_bytes: int = 0
    moved_s: float = 0.0


class Simulation:
    """One run. `run` plays a trace to its end, or to `until_s`."""

    def __init__(self, scheduler: Scheduler, world: World) -> None:
        self.scheduler = scheduler
        self.world = world
        self.outcomes: list[Outcome] = []
        self.clock = Clock()
        self._network = Network(world, self.clock)
        self._live: dict[str, _Live] = {}
        self._runs: dict[_RunKey, _Run] = {}
        self._held: dict[str, tuple[Host, SimulatedEngine, Job]] = {}
        self._turns: dict[str, deque[tuple[str, TraceRequest]]] = {}
        self._to_come = 0
        self._timers = 0
        draw = random.Random(world.seed)

        def noise() -> float:
            return max(0.5, draw.gauss(1.0, world.step_noise)) if world.step_noise else 1.0

        self.hosts = {
            w.snapshot.worker_id: Host(w, self.clock, noise, self._stepped, self._pulling)
            for w in world.workers
        }
        for host in self.hosts.values():
            self._tell(m.WorkerReported(host.snapshot))
        if world.declare_links:
            self._declare_links()
        for fault in world.worker_faults:
            self._plan_worker_fault(fault)
        for cut in world.link_faults:
            self._plan_link_fault(cut)

    @property
    def engines(self) -> dict[str, SimulatedEngine]:
        """The engines as they are now, by worker."""
        return {worker_id: host.engine for worker_id, host in self.hosts.items()}

    def _declare_links(self) -> None:
        for p in self.hosts:
            for d in self.hosts:
                if p != d:
                    link = self.scheduler.links.of(p, d)
                    link.rate_bytes_s = self.world.link_rate(p, d)
                    link.latency_s = self.world.link_latency_s

    def run(
        self,
        trace: Iterable[TraceRequest],
        until_s: float = float("inf"),
        on_time: Callable[[float], None] | None = None,
    ) -> list[Outcome]:
        """Play `trace`; returns one outcome per request that arrived, unfinished ones marked so.

        Requests are named r0, r1, ... by their place in the trace. The second and later turns of a
        session come when the turn before has ended and the user has thought.
        """
        for number, request in enumerate(trace):
            self._to_come += 1
            request_id = f"r{number}"
            if request.session and request.session in self._turns:
                self._turns[request.session].append((request_id, request))
                continue
            if request.session:
                self._turns[request.session] = deque()
            self._schedule(request, request_id)
        if self.world.snapshot_s:
            self.clock.after(self.world.snapshot_s, self._report_all)
        self.clock.run(until_s, on_time)
        return self.outcomes

    # --- requests -------------------------------------------------------------------------------

    def _schedule(self, trace: TraceRequest, request_id: str) -> None:
        self.clock.at(trace.at_s, lambda: self._arrive(trace, request_id))

    def _arrive(self, trace: TraceRequest, request_id: str) -> None:
        outcome = Outcome(trace, self.clock.now_s)
        self.outcomes.append(outcome)
        self._live[request_id] = _Live(request_id, trace, outcome)
        self._tell(m.RequestArrived(trace.request(request_id, MODEL)))

    def _end(self, live: _Live) -> None:
        del self._live[live.request_id]
        self._to_come -= 1
        turns = self._turns.get(live.trace.session) if live.trace.session else None
        if turns:
            request_id, following = turns.popleft()
            at_s = self.clock.now_s + following.after_s
            self._schedule(replace(following, at_s=at_s), request_id)

    # --- the scheduler --------------------------------------------------------------------------

    def _tell(self, event: m.Event) -> None:
        for command in self.scheduler.step(event, self.clock.now_s):
            self._obey(command)

    def _tell_later(self, event: m.Event) -> None:
        self.clock.after(self.world.report_s, lambda: self._tell(event))

    def _obey(self, command: m.Command) -> None:
        match command:
            case m.StartAggregated(request_id, attempt, worker_id, choice):
                self._note(request_id, choice)
                self._order_leg((request_id, attempt, m.Leg.AGGREGATED), worker_id, None)
            case m.StartPrefill(request_id, attempt, worker_id, _, choice):
                self._note(request_id, choice)
                self._order_leg((request_id, attempt, m.Leg.PREFILL), worker_id, None)
            case m.StartDecode(request_id, attempt, worker_id, handoff):
                self._order_leg((request_id, attempt, m.Leg.DECODE), worker_id, handoff)
            case m.Cancel(request_id, attempt, worker_id):
                self._cancel(request_id, attempt, worker_id)
            case m.ReleaseKV(handoff):
                self.clock.after(self.world.dispatch_s, lambda: self._release(handoff))
            case m.Reject(request_id, refusal):
                live = self._live[request_id]
                live.outcome.refusal = refusal
                self._end(live)
            case m.WakeAt(at_s):
                self._set_timer(at_s)
            case m.SetRole(worker_id, role):
                self._tell_later(m.WorkerReported(self.hosts[worker_id].report(role)))

    def _set_timer(self, at_s: float) -> None:
        self._timers += 1
        number = self._timers

        def fire() -> None:
            if number == self._timers:  # a later WakeAt replaces an earlier one
                self._tell(m.TimerFired())

        self.clock.at(at_s, fire)

    def _note(self, request_id: str, choice: m.Choice) -> None:
        outcome = self._live[request_id].outcome
        outcome.released_s = self.clock.now_s
        if choice.chosen is not None:
            outcome.plan = choice.chosen.plan
            outcome.predicted_ttft_s = choice.chosen.predicted_ttft_s

    # --- legs -----------------------------------------------------------------------------------

    def _order_leg(self, key: _RunKey, worker_id: str, handoff: m.Handoff | None) -> None:
        request_id, attempt, leg = key
        live, host = self._live[request_id], self.hosts[worker_id]
        trace = live.trace
        job = Job(
            (request_id, attempt),
            trace.prompt_tokens,
            trace.output_tokens,
            priority=_BATCH_PRIORITY if trace.batch else 0,
            prefill_only=leg is m.Leg.PREFILL,
            pulled=leg is m.Leg.DECODE,
            block_hashes=trace.block_hashes,
        )
        self._runs[key] = _Run(live, host, job, handoff)
        self.clock.after(self.world.dispatch_s, lambda: self._begin(key))

    def _begin(self, key: _RunKey) -> None:
        run = self._runs.get(key)
        if run is None:  # cancelled meanwhile
            return
        if not run.host.up:
            self._fail(key, m.Failure.UNREACHABLE, "connection refused")
        elif not run.host.engine.fits(run.job):
            self._fail(key, m.Failure.REFUSED, "longer than its KV memory", final=True)
        elif run.job.pulled:
            run.host.engine.pull(run.job)
            run.host.kick()
        else:
            run.host.engine.add(run.job)
            run.host.kick()

    def _fail(self, key: _RunKey, failure: m.Failure, detail: str, *, final: bool = False) -> None:
        run = self._runs.pop(key, None)
        if run is not None:
            worker_id = run.host.worker_id
            self._tell_later(m.LegFailed(*key, worker_id, failure, detail, final=final))

    def _cancel(self, request_id: str, attempt: int, worker_id: str) -> None:
        """What the leg still brings is ignored from now on; the engine hears of it a bit later."""
        for leg in m.Leg:
            run = self._runs.get((request_id, attempt, leg))
            if run is not None and run.host.worker_id == worker_id:
                del self._runs[request_id, attempt, leg]
                self._drop_later(run)

    def _drop_later(self, run: _Run) -> None:
        engine = run.host.engine

        def drop() -> None:
            if run.host.engine is engine and run.job.order:
                run.host.streams.pop(run.job.key, None)
                engine.drop(run.job)
                run.host.kick()

        self.clock.after(self.world.dispatch_s, drop)

    # --- hand-offs ------------------------------------------------------------------------------

    def _pulling(self, host: Host, job: Job) -> None:
        """The decode worker has room: let the KV come."""
        key = (*job.key, m.Leg.DECODE)
        run = self._runs.get(key)
        if run is None or run.handoff is None:
            return
        source, engine, _ = self._held.get(run.handoff.handoff_id, (None, None, None))
        if source is None or source.engine is not engine:
            host.engine.drop(job)
            self._fail(key, m.Failure.HANDOFF, f"{run.handoff.worker_id} does not have the KV")
            return
        fresh_tokens = job.prompt_tokens - job.cached_tokens
        run.moved_bytes = fresh_tokens * source.snapshot.kv_bytes_per_token

        def landed(took_s: float) -> None:
            run.moved_s = run.live.outcome.transfer_s = took_s
            if run.handoff is not None:
                self._release(run.handoff)
            host.engine.land(job)
            host.kick()

        def broken(why: str) -> None:
            self._fail(key, m.Failure.HANDOFF, why)
            if host.up:
                host.engine.drop(job)
                host.kick()

        self._network.move(source.worker_id, host.worker_id, run.moved_bytes, landed, broken)

    def _release(self, handoff: m.Handoff) -> None:
        host, engine, job = self._held.pop(handoff.handoff_id, (None, None, None))
        if host is not None and host.engine is engine and job is not None:
            host.engine.release(job)
            host.kick()

    # --- what engines bring ---------------------------------------------------------------------

    def _stepped(self, host: Host, result: StepResult) -> None:
        engine = host.engine
        if result.first or result.prefilled or result.finished:
            self.clock.after(self.world.report_s, lambda: self._hear(host, engine, result))
        if self.clock.now_s - host.told_s >= self.world.progress_s:
            self._tell_progress(host)

    def _hear(self, host: Host, engine: SimulatedEngine, result: StepResult) -> None:
        """The edge learns of it: from here on the client has it."""
        for job in result.prefilled:
            self._prefilled(host, engine, job)
        for job in result.first:
            self._first_token(host, job)
        for job in result.finished:
            self._finished(host, engine, job)

    def _prefilled(self, host: Host, engine: SimulatedEngine, job: Job) -> None:
        request_id, attempt = job.key
        if self._runs.pop((request_id, attempt, m.Leg.PREFILL), None) is None:
            return
        handoff = m.Handoff(f"{request_id}/{attempt}", host.worker_id, "sim")
        self._held[handoff.handoff_id] = (host, engine, job)
        self._tell(m.PrefillFinished(request_id, attempt, job.prompt_tokens, job.cached_tokens))
        self._tell(m.HandoffReady(request_id, attempt, handoff))

    def _answering(self, job: Job) -> _Run | None:
        whole = self._runs.get((*job.key, m.Leg.AGGREGATED))
        return whole or self._runs.get((*job.key, m.Leg.DECODE))

    def _first_token(self, host: Host, job: Job) -> None:
        run = self._answering(job)
        if run is None:
            return
        run.live.outcome.first_token_s = self.clock.now_s
        host.streams[job.key] = job
        self._tell(m.FirstToken(*job.key, run.moved_bytes, run.moved_s))

    def _finished(self, host: Host, engine: SimulatedEngine, job: Job) -> None:
        run = self._answering(job)
        host.streams.pop(job.key, None)
        if run is None:
            return
        del self._runs[(*job.key, m.Leg.DECODE if job.pulled else m.Leg.AGGREGATED)]
        outcome = run.live.outcome
        outcome.last_token_s = self.clock.now_s
        outcome.output_tokens = job.output_tokens
        outcome.bursts = tuple(job.bursts)
        outcome.step_ends_s = engine.ended_s
        sizes = (job.prompt_tokens, job.cached_tokens, job.output_tokens)
        self._tell(m.DecodeFinished(*job.key, *sizes))
        self._end(run.live)

    def _tell_progress(self, host: Host) -> None:
        host.told_s = self.clock.now_s
        step, now_s = host.engine.steps, self.clock.now_s
        progress = tuple(
            (key[0], key[1], job.tokens_at(step), now_s)
            for key, job in host.streams.items()
            if job.decoding
        )
        if progress:
            self._tell_later(m.StreamsAdvanced(progress))

    def _report_all(self) -> None:
        for host in self.hosts.values():
            if host.up:
                self._tell_later(m.WorkerReported(host.report()))
        if self._to_come:
            self.clock.after(self.world.snapshot_s, self._report_all)

    # --- faults ---------------------------------------------------------------------------------

    def _plan_link_fault(self, fault: LinkFault) -> None:
        ends = (fault.source, fault.target)
        self.clock.at(fault.at_s, lambda: self._network.cut(*ends))
        if fault.back_s is not None:
            self.clock.at(fault.back_s, lambda: self._network.mend(*ends))

    def _plan_worker_fault(self, fault: WorkerFault) -> None:
        host = self.hosts[fault.worker_id]
        self.clock.at(fault.at_s, lambda: self._kill(host))
        if fault.back_s is not None:
            self.clock.at(fault.back_s, lambda: self._revive(host))

    def _kill(self, host: Host) -> None:
        host.die()
        for key, run in list(self._runs.items()):
            if run.host is host and run.job.order:  # else it finds the door closed by itself
                self._fail(key, m.Failure.BROKEN, "connection reset")
        self._network.lost(host.worker_id)

        def give_up() -> None:
            if not host.up:
                self._tell(m.WorkerLost(host.worker_id, "no answer"))

        self.clock.after(self.world.detect_s, give_up)

    def _revive(self, host: Host) -> None:
        host.up = True
        self._tell(m.WorkerReported(host.report()))
