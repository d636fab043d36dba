"""Aggregated or disaggregated: what each rule's choice cost, against the better of the two.

A newcomer meets a prefill worker, a decode worker and the link between them, over which its KV
would go. The oracle tries both plans in the simulator and takes the cheaper one. Targets are so
loose that no guard binds: what is judged is the pricing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from splitserve.messages import PlanKind, Slo
from splitserve.scheduling import Scheduler, SchedulerLimits
from splitserve.scheduling.policies import Policy
from splitserve.scheduling.policies.catalog import by_name
from splitserve.scheduling.policies.least_work import LeastWork
from splitserve.simulation.driver import Simulation
from splitserve.simulation.results import Outcome
from splitserve.simulation.scenario import DecisionScenario, exact
from splitserve.simulation.trace import TraceRequest
from splitserve.simulation.world import World
from splitserve.simulation.world_file import GBIT_BYTES

COST = (
    "seconds: the newcomer's time to first token, plus the pause it puts into the answers that are "
    "being decoded (how much later than without it their last tokens come, mean over them; 0 where "
    "nobody decodes). regret: cost over that of the better plan, minus 1, mean over the sweep. "
    "regret_summed_pauses: the same with the sum of the pauses in place of their mean."
)
RULES = (
    "slack",
    "always-local",
    "always-remote",
    "static-pd:256",
    "static-pd:1000",
    "static-pd:2048",
)
_LOOSE = Slo(ttft_s=1e5, tpot_s=1e3)
_NEWCOMER_AT_S = 5.0  # by then the streams decode, and nothing is pending


@dataclass(frozen=True, slots=True)
class Situation:
    """One point of the sweep."""

    link_gbit_s: float
    prompt_tokens: int
    streams: int


@dataclass(frozen=True, slots=True)
class Cost:
    """What a plan cost: the newcomer's wait, and the mean pause of those who decode already."""

    ttft_s: float
    pause_s: float

    def total_s(self, weight: float) -> float:
        """Both in one figure."""
        return self.ttft_s + weight * self.pause_s


@dataclass(frozen=True, slots=True)
class Judged:
    """What was chosen in one situation, and what every plan would have cost."""

    situation: Situation
    plan: PlanKind
    cost: Cost
    plans: Mapping[PlanKind, Cost]

    def oracle(self, *, summed: bool = False) -> PlanKind:
        """Return the cheaper plan."""
        return min(self.plans, key=lambda plan: self.plans[plan].total_s(self._weight(summed)))

    def regret(self, *, summed: bool = False) -> float:
        """Relative excess over the oracle; `summed`: pauses count for each who has one."""
        weight = self._weight(summed)
        best = self.plans[self.oracle(summed=summed)]
        return self.cost.total_s(weight) / best.total_s(weight) - 1

    def _weight(self, summed: bool) -> float:
        return float(self.situation.streams) if summed else 1.0


def situations(scenario: DecisionScenario) -> list[Situation]:
    """Every point of the sweep."""
    return [
        Situation(link, prompt, streams)
        for streams in scenario.streams
        for link in scenario.link_gbit_s
        for prompt in scenario.prompts_tokens
    ]


def judge(
    scenario: DecisionScenario, policies: Sequence[str], progress: Callable[[], None] | None = None
) -> dict[str, list[Judged]]:
    """Let every policy choose in every situation. Raises ValueError for an unknown policy."""
    makers = {name: partial(by_name, name) for name in policies}
    for maker in makers.values():
        maker()  # an unknown name is told before the work
    judged: dict[str, list[Judged]] = {name: [] for name in policies}
    alone_s: dict[int, float] = {}
    for situation in situations(scenario):
        if situation.streams not in alone_s:
            alone_s[situation.streams] = _ends_alone(scenario, situation)
        trial = partial(_try, scenario, situation, alone_s[situation.streams])
        plans = {plan: trial(LeastWork(), plan)[1] for plan in PlanKind}
        for name, maker in makers.items():
            judged[name].append(Judged(situation, *trial(maker(), None), plans))
        if progress is not None:
            progress()
    return judged


def mean_regret(judged: Sequence[Judged], *, summed: bool = False) -> float:
    """Mean relative excess over the oracle."""
    return sum(j.regret(summed=summed) for j in judged) / len(judged)


def _ends_alone(scenario: DecisionScenario, situation: Situation) -> float:
    outcomes = _simulation(scenario, situation, LeastWork()).run(_streams(scenario, situation))
    return _mean_end_s(outcomes)


def _try(
    scenario: DecisionScenario,
    situation: Situation,
    alone_s: float,
    policy: Policy,
    plan: PlanKind | None,
) -> tuple[PlanKind, Cost]:
    newcomer = TraceRequest(
        _NEWCOMER_AT_S,
        situation.prompt_tokens,
        scenario.output_tokens,
        "newcomer",
        _LOOSE,
        max_tokens=scenario.output_tokens,
        forced_plan=plan,
        forced_worker=_decoder(scenario.world) if plan is PlanKind.AGGREGATED else None,
    )
    simulation = _simulation(scenario, situation, policy)
    *others, mine = simulation.run([*_streams(scenario, situation), newcomer])
    assert mine.ttft_s is not None, "the newcomer was never served"
    assert mine.plan is not None, "a served request has a plan"
    pause_s = _mean_end_s(others) - alone_s
    return mine.plan, Cost(mine.ttft_s, max(0.0, pause_s))


def _simulation(scenario: DecisionScenario, situation: Situation, policy: Policy) -> Simulation:
    world = exact(replace(scenario.world, link_bytes_s=situation.link_gbit_s * GBIT_BYTES))
    return Simulation(Scheduler(policy, SchedulerLimits(max_wait_s=1e9)), world)


def _streams(scenario: DecisionScenario, situation: Situation) -> list[TraceRequest]:
    stream = TraceRequest(
        0.0,
        scenario.context_tokens,
        scenario.stream_output_tokens,
        "stream",
        _LOOSE,
        max_tokens=scenario.stream_output_tokens,
        forced_plan=PlanKind.AGGREGATED,
        forced_worker=_decoder(scenario.world),
    )
    return [stream] * situation.streams


def _decoder(world: World) -> str:
    return world.workers[-1].snapshot.worker_id


def _mean_end_s(outcomes: Sequence[Outcome]) -> float:
    ends_s = [o.last_token_s for o in outcomes if o.last_token_s is not None]
    assert len(ends_s) == len(outcomes), "a stream did not end"
    return sum(ends_s) / len(ends_s) if ends_s else 0.0
