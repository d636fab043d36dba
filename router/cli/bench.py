"""`splitserve bench`: measurements of this machine. The figures come from `benchmarks`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from router.cli.errors import CommandFailed
from router.cli.options import Json

Out = Annotated[
    Path | None, typer.Option(help="Folder to write the JSON into as well.", show_default=False)
]
bench = typer.Typer(help="Measure this machine.", no_args_is_help=True)


@bench.command()
def relay(as_json: Json = False, out: Out = None) -> None:
    """CPU the router spends on a request, beside other routers."""
    _measure("relay", "benchmarks.relay", as_json, out)


@bench.command("kv-transfer")
def kv_transfer(as_json: Json = False, out: Out = None) -> None:
    """Speed of the hand-off between two workers, against the raw link."""
    _measure("kv-transfer", "benchmarks.kv_transfer", as_json, out)


@bench.command()
def engine(as_json: Json = False, out: Out = None) -> None:
    """Speed of the native engine, against what the memory and the arithmetic allow."""
    _measure("engine", "benchmarks.engine_speed", as_json, out)


@bench.command()
def scheduling(as_json: Json = False, out: Out = None) -> None:
    """Cost of a scheduling decision, how it grows, and the speed of the simulator."""
    _measure("scheduling", "benchmarks.scheduling_cost", as_json, out)


@bench.command("live-flood")
def live_flood(as_json: Json = False, out: Out = None) -> None:
    """Interactive requests under a flood of batch, policy beside policy."""
    _measure("live-flood", "benchmarks.live_flood", as_json, out)


@bench.command("live-fidelity")
def live_fidelity(as_json: Json = False, out: Out = None) -> None:
    """The simulator against native workers on this machine, on the same trace."""
    _measure("live-fidelity", "benchmarks.live_fidelity", as_json, out)


def _measure(name: str, module: str, as_json: bool, out: Path | None) -> None:
    import contextlib
    import importlib
    import json
    import sys

    from benchmarks.errors import BenchmarkError

    try:
        measure = importlib.import_module(module).run
        with contextlib.redirect_stdout(sys.stderr):
            result: dict[str, Any] = measure()
    except BenchmarkError as error:
        raise CommandFailed(f"bench {name}: {error}") from error
    except ModuleNotFoundError as error:
        raise CommandFailed(
            f"bench {name} needs {error.name}, which is not installed; "
            "pip install 'splitserve[native,bench]'"
        ) from error
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
    if as_json:
        print(json.dumps(result))
    else:
        _show(name, result)


def _show(name: str, result: dict[str, Any]) -> None:
    from router.cli.console import stdout_console, table

    systems = result.get("systems")
    console = stdout_console()
    if isinstance(systems, dict):
        columns = {system: flatten(figures) for system, figures in systems.items()}
        rows = table(console, name, *columns, right=tuple(range(1, len(columns) + 1)))
        for figure in dict.fromkeys(key for column in columns.values() for key in column):
            rows.add_row(figure, *(column.get(figure, "-") for column in columns.values()))
        console.print(rows)
    rest = flatten({key: value for key, value in result.items() if key != "systems"})
    rows = table(console, name, "figure", right=(1,))
    for figure, value in rest.items():
        rows.add_row(figure, value)
    console.print(rows)


def flatten(figures: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Name each leaf of nested figures by its path, and write it for people."""
    flat: dict[str, str] = {}
    for key, value in figures.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict):
            flat |= flatten(value, f"{path}.")
        else:
            flat[path] = f"{value:.4g}" if isinstance(value, float) else str(value)
    return flat
