"""One policy on one window of a scenario."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from splitserve.performance.lengths import Lengths
from splitserve.scheduling import Scheduler, SchedulerLimits
from splitserve.scheduling.policies import Policy
from splitserve.scheduling.policies.catalog import by_name
from splitserve.scheduling.policies.immediate import ImmediatePolicy
from splitserve.simulation.driver import Simulation
from splitserve.simulation.figures import ModelFit, WindowFigures
from splitserve.simulation.scenario import exact
from splitserve.simulation.trace import TraceRequest
from splitserve.simulation.world import World

CLAIRVOYANT = "clairvoyant"
_LIMITS = SchedulerLimits(queue=1 << 30, max_wait_s=1e9)


@dataclass(frozen=True, slots=True)
class Cell:
    """One run: everything it needs, so that another process can do it.

    `policy` is a name of the catalogue or an import path; "clairvoyant" is `slack` that knows
    every length and every coefficient.
    """

    policy: str
    start_s: float
    length_s: float
    scored_s: float
    world: World
    trace: tuple[TraceRequest, ...]


def run_cell(cell: Cell, on_time: Callable[[float], None] | None = None) -> WindowFigures:
    """Play one window. Raises ValueError for an unknown policy."""
    clairvoyant = cell.policy == CLAIRVOYANT
    policy = by_name("slack" if clairvoyant else cell.policy)
    world = exact(cell.world) if clairvoyant else told(cell.world, policy)
    oracle = {f"r{n}": request.output_tokens for n, request in enumerate(cell.trace)}
    lengths = Lengths(oracle.__getitem__) if clairvoyant else None
    simulation = Simulation(Scheduler(policy, _LIMITS, lengths), world)
    outcomes = simulation.run(cell.trace, cell.length_s, on_time)
    figures = WindowFigures(cell.start_s, world.seed, cell.length_s, cell.scored_s)
    for outcome in outcomes:
        figures.see(outcome)
    figures.preemptions = sum(engine.preemptions for engine in simulation.engines.values())
    for worker in world.workers:
        account = simulation.scheduler.ledger.workers.get(worker.snapshot.worker_id)
        if account is not None:
            model = account.model
            figures.fits[account.worker_id] = ModelFit(
                model.decode_drift.error,
                model.prefill_drift.error,
                model.coefficients,
                worker.coefficients,
            )
    return figures


def told(world: World, policy: Policy) -> World:
    """Keep the KV size from a policy that would only hold requests back for it.

    The routers whose rules these are send every request on at once; the engine queues.
    """
    if not isinstance(policy, ImmediatePolicy):
        return world
    untold = tuple(
        replace(w, snapshot=replace(w.snapshot, kv_capacity_tokens=0)) for w in world.workers
    )
    return replace(world, workers=untold)
