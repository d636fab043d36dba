"""Run scenarios of the simulator: every policy on every window, side by side in processes."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.result import envelope
from splitserve.scheduling.policies import catalog
from splitserve.simulation import decision, fidelity
from splitserve.simulation.figures import WindowFigures, figures
from splitserve.simulation.readers import read_recorded
from splitserve.simulation.scenario import (
    DecisionScenario,
    FidelityScenario,
    Scenario,
    ServeScenario,
    Traffic,
    Windows,
)
from splitserve.simulation.serving import CLAIRVOYANT, Cell, run_cell
from splitserve.simulation.toml_table import ScenarioError
from splitserve.simulation.workload import TraceFolder, batch_jobs, window_trace
from splitserve.simulation.world import World

SCENARIOS = Path(__file__).parent / "scenarios"
SCHEMA = "splitserve.simulate/1"
_DRAIN_S = 60.0  # after the last arrival of a trace that is played whole

Json = dict[str, Any]
Progress = Callable[[float, float, str], None]  # done, of how much, what was done


@dataclass(frozen=True, slots=True)
class Options:
    """What a run may be asked for beside its scenario. None and (): as the scenario says."""

    policies: tuple[str, ...] = ()
    rate: float | None = None
    seed: int | None = None
    windows_s: tuple[float, ...] = ()
    batch_jobs: int | None = None
    clairvoyant: bool = False
    bound: bool = False
    engine_priority: bool = False
    traces: Path | None = None
    trace: Path | None = None
    processes: int = 0  # 0: one for each core


def names() -> tuple[str, ...]:
    """Scenarios that come with the project."""
    return tuple(sorted(path.stem for path in SCENARIOS.glob("*.toml")))


def run(scenario: Scenario, options: Options, progress: Progress) -> Json:
    """Return one result. Raises ScenarioError, TraceError, and ValueError for unknown policies."""
    match scenario:
        case ServeScenario():
            return _serve(scenario, options, progress)
        case DecisionScenario():
            return _decide(scenario, options, progress)
        case FidelityScenario():
            return _compare(scenario, options, progress)


# --- serving --------------------------------------------------------------------------------------


def _serve(scenario: ServeScenario, options: Options, progress: Progress) -> Json:
    folder = TraceFolder(options.traces)
    if options.trace is not None:
        scenario = with_trace(scenario, folder, options.trace)
    if options.windows_s:
        scenario = replace(scenario, windows=replace(scenario.windows, starts_s=options.windows_s))
    if options.engine_priority:
        scenario = replace(scenario, world=with_priority(scenario.world))
    rate = scenario.rate if options.rate is None else options.rate
    seed = scenario.seed if options.seed is None else options.seed
    jobs = batch_jobs(scenario, rate, options.batch_jobs)
    policies = _policies(options, catalog.names())
    result = envelope(SCHEMA, scenario.name, seed=seed)
    windows = _cells_by_window(scenario, folder, rate, jobs, seed)
    cells = [replace(cell, policy=policy) for policy in policies for cell in windows]
    done: dict[str, list[WindowFigures]] = {policy: [] for policy in policies}
    cpu_s = dict.fromkeys(policies, 0.0)
    for cell, (window, took_s) in zip(cells, _run_all(cells, options, progress), strict=True):
        done[cell.policy].append(window)
        cpu_s[cell.policy] += took_s
    result |= {"rate": rate, "batch_jobs": jobs, "windows": len(windows)}
    result["engine_priority"] = all(w.shape.priority for w in scenario.world.workers)
    result["classes"] = sorted({traffic.service_class for traffic in scenario.traffic})
    result["policies"] = {name: figures(done[name], scenario.groups) for name in policies}
    played_s = scenario.windows.length_s * len(windows)
    result["times_real"] = {name: round(played_s / cpu_s[name], 1) for name in policies}
    if options.bound:
        result["bound"] = _bound(windows)
    return result


def with_trace(scenario: ServeScenario, folder: TraceFolder, trace: Path) -> ServeScenario:
    """Replace the scenario's traffic by one trace, played whole under the first class's targets."""
    first = scenario.traffic[0]
    path = str(trace.absolute())
    requests = folder.requests(path, "")
    last_s = max(request.at_s for request in requests)
    thinking_s: dict[str, float] = {}  # later turns of a session come when they come
    for request in requests:
        thinking_s[request.session] = thinking_s.get(request.session, 0.0) + request.after_s
    last_s += max(thinking_s.values())
    traffic = Traffic(
        first.service_class,
        path,
        "",
        first.targets,
        first.max_prompt_tokens,
        first.max_output_tokens,
    )
    windows = Windows((0.0,), last_s + _DRAIN_S, last_s + 1.0)
    return replace(scenario, traffic=(traffic,), windows=windows, groups={})


def with_priority(world: World) -> World:
    """Let engines take, and preempt, by priority: interactive before batch."""
    workers = tuple(replace(w, shape=replace(w.shape, priority=True)) for w in world.workers)
    return replace(world, workers=workers)


def _policies(options: Options, default: Sequence[str]) -> tuple[str, ...]:
    wanted = tuple(dict.fromkeys(options.policies or default))
    for name in wanted:
        catalog.by_name(name)
    return (*wanted, CLAIRVOYANT) if options.clairvoyant else wanted


def _cells_by_window(
    scenario: ServeScenario, folder: TraceFolder, rate: float, jobs: int, seed: int
) -> list[Cell]:
    cells = []
    windows = scenario.windows
    for number, start_s in enumerate(windows.starts_s):
        trace = window_trace(scenario, folder, start_s, rate=rate, jobs=jobs, seed=seed + number)
        if not any(not request.batch for request in trace):
            raise ScenarioError(f"{scenario.name}: nothing arrives in the window at {start_s:g} s")
        world = replace(scenario.world, seed=seed + number)
        cells.append(Cell("", start_s, windows.length_s, windows.scored_s, world, tuple(trace)))
    return cells


def _run_all(
    cells: list[Cell], options: Options, progress: Progress
) -> Iterator[tuple[WindowFigures, float]]:
    """Yield what each cell gave and the CPU seconds it took, in the order of `cells`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    processes = min(options.processes or cores, len(cells))
    total = float(len(cells))
    progress(0.0, total, "")
    if processes <= 1:
        for number, cell in enumerate(cells):
            yield _timed(cell)
            progress(number + 1.0, total, cell.policy)
        return
    # Spawned, not forked: a progress bar's thread must not be copied in the middle of something.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        for number, timed in enumerate(pool.map(_timed, cells)):
            yield timed
            progress(number + 1.0, total, cells[number].policy)


def _timed(cell: Cell) -> tuple[WindowFigures, float]:
    started_s = time.process_time()
    window = run_cell(cell)
    return window, time.process_time() - started_s


def _bound(cells: Sequence[Cell]) -> Json:
    from benchmarks.fluid_bound import fluid_bound

    shares = [fluid_bound(cell.trace, cell.world, cell.scored_s) for cell in cells]
    return {
        "kind": "fluid relaxation, without batch",
        "windows": [round(share, 4) for share in shares],
        "mean_of_windows": round(sum(shares) / len(shares), 4),
    }


# --- the other kinds ------------------------------------------------------------------------------


def _decide(scenario: DecisionScenario, options: Options, progress: Progress) -> Json:
    policies = _policies(replace(options, clairvoyant=False), decision.RULES)
    result = envelope(SCHEMA, scenario.name, seed=scenario.seed)
    total, done = len(decision.situations(scenario)), 0

    def step() -> None:
        nonlocal done
        done += 1
        progress(float(done), float(total), "")

    judged = decision.judge(scenario, policies, step)
    result["cost"] = decision.COST
    result["situations"] = total
    result["policies"] = {name: _regrets(scenario, rows) for name, rows in judged.items()}
    return result


def _regrets(scenario: DecisionScenario, rows: list[decision.Judged]) -> Json:
    return {
        "regret": round(decision.mean_regret(rows), 4),
        "regret_summed_pauses": round(decision.mean_regret(rows, summed=True), 4),
        "worst_regret": round(max(row.regret() for row in rows), 4),
        "wrong_choices": sum(row.plan is not row.oracle() for row in rows),
        "regret_by_streams": {
            str(streams): round(
                decision.mean_regret([r for r in rows if r.situation.streams == streams]), 4
            )
            for streams in scenario.streams
        },
    }


def _compare(scenario: FidelityScenario, options: Options, progress: Progress) -> Json:
    result = envelope(SCHEMA, scenario.name, seed=scenario.seed)
    recorded = read_recorded(TraceFolder(options.traces).path(scenario.recording))
    last_s = max(r.request.at_s + r.e2e_s for r in recorded)
    compared = fidelity.compare(
        recorded, scenario.world, lambda now_s: progress(min(now_s, last_s), last_s, "")
    )
    progress(last_s, last_s, "")
    measures = fidelity.MEASURES
    result["requests"] = len(recorded)
    result["preemptions"] = compared.preemptions
    result["error"] = {name: round(compared.error(name), 4) for name in measures}
    result["error_of_percentiles"] = {
        name: {at: round(e, 4) for at, e in compared.percentile_error(name).items()}
        for name in measures
    }
    result["mean_ms"] = {name: compared.means_ms(name) for name in measures}
    return result
