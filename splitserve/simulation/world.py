"""What surrounds the scheduler in a simulation: workers, links, delays, faults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from splitserve.messages import WorkerSnapshot
from splitserve.performance.coefficients import Coefficients
from splitserve.performance.links import LATENCY_S
from splitserve.simulation.job import EngineShape


@dataclass(frozen=True, slots=True)
class SimulatedWorker:
    """One worker: what it tells the router, and what it really is."""

    snapshot: WorkerSnapshot
    shape: EngineShape
    coefficients: Coefficients


@dataclass(frozen=True, slots=True)
class WorkerFault:
    """A worker dies at `at_s` with all it held, and comes back empty at `back_s`, or never."""

    worker_id: str
    at_s: float
    back_s: float | None = None


@dataclass(frozen=True, slots=True)
class LinkFault:
    """Nothing moves from one worker to another between `at_s` and `back_s`."""

    source: str
    target: str
    at_s: float
    back_s: float | None = None


@dataclass(frozen=True, slots=True)
class World:
    """Everything around the scheduler. Delays in seconds, link rates in bytes per second.

    `dispatch_s` passes between a command and its effect, `report_s` between something happening
    and the scheduler's hearing of it. Streams' progress is told every `progress_s`, workers' own
    reports every `snapshot_s` (0: only the first). `detect_s` after its death a worker is given up.
    `link_rates` overrides `link_bytes_s` for single directions of single pairs.
    """

    workers: tuple[SimulatedWorker, ...]
    link_bytes_s: float = 25e9 / 8
    link_latency_s: float = LATENCY_S
    link_rates: Mapping[tuple[str, str], float] = field(default_factory=dict)
    step_noise: float = 0.05
    dispatch_s: float = 0.001
    report_s: float = 0.001
    progress_s: float = 0.05
    snapshot_s: float = 0.0
    detect_s: float = 1.0
    declare_links: bool = True
    worker_faults: tuple[WorkerFault, ...] = ()
    link_faults: tuple[LinkFault, ...] = ()
    seed: int = 1

    def link_rate(self, source: str, target: str) -> float:
        """Bytes per second from one worker to another."""
        return self.link_rates.get((source, target), self.link_bytes_s)
