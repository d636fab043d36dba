"""How far simulated times lie from those of a real engine that served the same requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from splitserve.scheduling import Scheduler, SchedulerLimits
from splitserve.scheduling.policies.least_requests import LeastRequests
from splitserve.simulation.driver import Simulation
from splitserve.simulation.readers import Recorded
from splitserve.simulation.results import percentiles
from splitserve.simulation.serving import told
from splitserve.simulation.world import World

MEASURES = ("ttft", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class Fidelity:
    """Seconds, real and simulated, of each measure; requests without a TPOT have none in it."""

    real_s: dict[str, list[float]]
    simulated_s: dict[str, list[float]]
    preemptions: int

    def error(self, measure: str) -> float:
        """Relative error of the mean: negative where the simulation is too fast."""
        return _mean(self.simulated_s[measure]) / _mean(self.real_s[measure]) - 1

    def means_ms(self, measure: str) -> dict[str, float]:
        """Real and simulated mean in milliseconds."""
        both = {"real": self.real_s[measure], "simulated": self.simulated_s[measure]}
        return {name: round(_mean(values) * 1e3, 2) for name, values in both.items()}

    def percentile_error(self, measure: str) -> dict[str, float]:
        """Relative errors of p50, p90 and p99."""
        real, simulated = percentiles(self.real_s[measure]), percentiles(self.simulated_s[measure])
        return {name: (simulated[name] or 0.0) / (value or 1.0) - 1 for name, value in real.items()}


def compare(
    recorded: Sequence[Recorded], world: World, on_time: Callable[[float], None] | None = None
) -> Fidelity:
    """Play recorded requests through `world`, which should be one worker, each sent on at once."""
    policy = LeastRequests()
    limits = SchedulerLimits(queue=len(recorded) + 1, max_wait_s=1e9)
    simulation = Simulation(Scheduler(policy, limits), told(world, policy))
    ordered = sorted(recorded, key=lambda r: r.request.at_s)
    outcomes = simulation.run([r.request for r in ordered], on_time=on_time)
    real = [(r.ttft_s, r.tpot_s, r.e2e_s) for r in ordered]
    simulated = [(o.ttft_s, o.tpot_s, o.e2e_s) for o in outcomes]
    preemptions = sum(engine.preemptions for engine in simulation.engines.values())
    return Fidelity(_columns(real), _columns(simulated), preemptions)


def _columns(rows: Sequence[tuple[float | None, ...]]) -> dict[str, list[float]]:
    return {
        measure: [row[n] for row in rows if row[n] is not None]  # type: ignore[misc]
        for n, measure in enumerate(MEASURES)
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
