"""`splitserve simulate`: the same scheduler on a virtual clock, policies side by side."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from router.cli.errors import CommandFailed, WrongUsage
from router.cli.options import Json

if TYPE_CHECKING:
    from benchmarks.simulate import Options, Progress
    from splitserve.simulation.scenario import Scenario

_TRACES_HERE = Path("../shared/traces")
_TRACES_ENV = "SPLITSERVE_TRACES"


ScenarioName = Annotated[
    str | None, typer.Option(help="One of the project's scenarios.", show_default=False)
]
ScenarioFile = Annotated[
    Path | None, typer.Option("-c", "--config", help="Scenario file (TOML).", show_default=False)
]
Trace = Annotated[
    Path | None, typer.Option(help="Play this trace instead of the scenario's.", show_default=False)
]
Policies = Annotated[
    list[str] | None,
    typer.Option(
        "--policy", help="Policy, or package.module:Class; again for more.", show_default="all"
    ),
]
Rate = Annotated[
    float | None,
    typer.Option(min=0.01, help="Times the recorded rate.", show_default="the scenario's"),
]
Seed = Annotated[
    int | None, typer.Option(help="Of the first window.", show_default="the scenario's")
]
Starts = Annotated[
    list[float] | None,
    typer.Option(
        "--window", min=0, help="Start in the trace, in s; again for more.", show_default="all"
    ),
]
BatchJobs = Annotated[
    int | None, typer.Option(min=0, help="Batch jobs.", show_default="the scenario's")
]
Clairvoyant = Annotated[
    bool, typer.Option("--clairvoyant", help="Add slack that knows all lengths and speeds.")
]
Bound = Annotated[bool, typer.Option("--bound", help="Add the bound that no policy can pass.")]
EnginePriority = Annotated[
    bool, typer.Option("--engine-priority", help="Engines put interactive requests before batch.")
]
Traces = Annotated[
    Path | None,
    typer.Option(help="Folder of traces.", show_default=f"{_TRACES_HERE}, ${_TRACES_ENV}"),
]
Plot = Annotated[Path | None, typer.Option(help="Write a picture here.", show_default=False)]


def simulate(
    *,
    scenario: ScenarioName = None,
    config: ScenarioFile = None,
    trace: Trace = None,
    policies: Policies = None,
    rate: Rate = None,
    seed: Seed = None,
    windows: Starts = None,
    batch_jobs: BatchJobs = None,
    clairvoyant: Clairvoyant = False,
    bound: Bound = False,
    engine_priority: EnginePriority = False,
    traces: Traces = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Try policies on recorded traffic: engines, links and clients on a virtual clock."""
    from benchmarks.simulate import Options

    options = Options(
        policies=tuple(policies or ()),
        rate=rate,
        seed=seed,
        windows_s=tuple(windows or ()),
        batch_jobs=batch_jobs,
        clairvoyant=clairvoyant,
        bound=bound,
        engine_priority=engine_priority,
        traces=_trace_folder(traces),
        trace=trace,
    )
    _require(bound, "scipy", "--bound")
    _require(plot is not None, "matplotlib", "--plot")
    result = _run(_load(scenario, config), options)
    if plot is not None:
        _plot(result, plot)
    _print(result, as_json=as_json)


def _print(result: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        import json

        print(json.dumps(result))
    else:
        from router.cli.simulation_tables import show

        show(result)


def _run(scenario: Scenario, options: Options) -> dict[str, Any]:
    from benchmarks.simulate import run

    # Everything a user can get wrong here (files, names, numbers) is told as a ValueError.
    with _progress() as progress:
        try:
            return run(scenario, options, progress)
        except ValueError as error:
            raise WrongUsage(str(error)) from error


def _load(name: str | None, config: Path | None) -> Scenario:
    from difflib import get_close_matches

    from benchmarks.simulate import SCENARIOS, names
    from splitserve.simulation.scenario import load
    from splitserve.simulation.toml_table import ScenarioError

    known = ", ".join(names())
    if (name is None) == (config is None):
        wanted = "either --scenario or -c, not both" if name else "--scenario NAME or -c FILE"
        raise WrongUsage(f"simulate takes {wanted}; scenarios are {known}")
    if name is not None and name not in names():
        near = get_close_matches(name, names(), n=1)
        mend = f"did you mean {near[0]!r}?" if near else f"they are {known}"
        raise WrongUsage(f"--scenario {name!r}: there is no such scenario; {mend}")
    try:
        return load(config if config is not None else SCENARIOS / f"{name}.toml")
    except ScenarioError as error:
        raise WrongUsage(str(error)) from error


def _trace_folder(named: Path | None) -> Path | None:
    import os

    if named is not None:
        if not named.is_dir():
            raise WrongUsage(f"--traces {named}: there is no such folder")
        return named
    if _TRACES_HERE.is_dir():
        return _TRACES_HERE
    return Path(os.environ[_TRACES_ENV]) if _TRACES_ENV in os.environ else None


def _require(wanted: bool, module: str, option: str) -> None:
    from importlib.util import find_spec

    if wanted and find_spec(module) is None:
        raise CommandFailed(
            f"{option} needs {module}, which is not installed; pip install 'splitserve[bench]'"
        )


def _plot(result: dict[str, Any], file: Path) -> None:
    from benchmarks.simulation_plot import plot

    if not result.get("policies"):
        raise WrongUsage(f"--plot: scenario {result['scenario']} compares no policies")
    try:
        plot(result, file)
    except (ValueError, OSError) as error:
        raise CommandFailed(f"--plot {file}: {error}") from error


@contextmanager
def _progress() -> Iterator[Progress]:
    """A bar on a terminal; elsewhere nothing."""
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    from router.cli.console import stderr_console

    console = stderr_console()
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("simulating", total=None)

        def show(done: float, total: float, what: str) -> None:
            text = f"simulating {what}" if what else "simulating"
            bar.update(task, completed=done, total=total, description=text)

        yield show
