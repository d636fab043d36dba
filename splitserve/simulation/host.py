"""One simulated machine: an engine that steps while it has work, until it dies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from splitserve.messages import Role, WorkerSnapshot
from splitserve.simulation.clock import Clock
from splitserve.simulation.engine import SimulatedEngine
from splitserve.simulation.job import Job, StepResult
from splitserve.simulation.world import SimulatedWorker


class Host:
    """Steps its engine on a clock. `stepped` is called after each step, `pulling` for each job
    whose KV may come now.
    """

    def __init__(
        self,
        worker: SimulatedWorker,
        clock: Clock,
        noise: Callable[[], float],
        stepped: Callable[[Host, StepResult], None],
        pulling: Callable[[Host, Job], None],
    ) -> None:
        self.snapshot = worker.snapshot
        self.up = True
        self.told_s = -1.0
        self.streams: dict[tuple[str, int], Job] = {}
        self._worker = worker
        self._clock = clock
        self._noise = noise
        self._stepped = stepped
        self._pulling = pulling
        self._stepping = False
        self.engine = self._fresh_engine()

    @property
    def worker_id(self) -> str:
        """The worker's name."""
        return self.snapshot.worker_id

    def _fresh_engine(self) -> SimulatedEngine:
        return SimulatedEngine(self._worker.coefficients, self._worker.shape, self._noise)

    def kick(self) -> None:
        """Something changed: let transfers begin and a step start, if they can."""
        engine = self.engine
        for job in engine.admit_pulls():
            self._pulling(self, job)
        if self._stepping or not self.up:
            return
        duration_s = engine.plan_step()
        if duration_s is not None:
            self._stepping = True
            self._clock.after(duration_s, lambda: self._end_step(engine))

    def _end_step(self, engine: SimulatedEngine) -> None:
        if engine is not self.engine:  # the machine died in the middle of it
            return
        result = engine.end_step(self._clock.now_s)
        self._stepping = False
        self._stepped(self, result)
        self.kick()

    def die(self) -> None:
        """Lose everything."""
        self.up = False
        self._stepping = False
        self.streams.clear()
        self.engine = self._fresh_engine()

    def report(self, role: Role | None = None) -> WorkerSnapshot:
        """What the worker says of itself now."""
        if role is not None:
            self.snapshot = replace(self.snapshot, role=role)
        return replace(
            self.snapshot,
            kv_used_tokens=self.engine.kv_used_tokens,
            running=self.engine.running,
            waiting=self.engine.waiting,
        )
