"""`splitserve probe`: what answers there, how fast it is, and who can hand over to whom."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from router.cli.errors import WrongUsage
from router.cli.options import Json

if TYPE_CHECKING:
    from router.errors import ProbeFailed
    from router.fleet_probe import Found
    from router.sections import WorkerSpec

_NUMBERS = ("kv.lease_s",)
_EXAMPLE = "http://mac.local:8080,courier=http://mac.local:8090"

Workers = Annotated[
    list[str],
    typer.Argument(
        metavar="URL...",
        help=f"A worker's address, with what no route of it tells, like {_EXAMPLE} or "
        "http://10.0.0.5:8000,kv=nixl-pull,name=gpu-1. Keys are those of a worker's entry in the "
        "configuration file.",
        show_default=False,
    ),
]
Write = Annotated[
    Path | None,
    typer.Option("--write", metavar="FILE", help="Write a configuration.", show_default=False),
]
KeyEnv = Annotated[
    str | None,
    typer.Option(
        "--key-env",
        metavar="NAME",
        help="The environment variable with the workers' key.",
        show_default=False,
    ),
]


def probe(
    *,
    workers: Workers,
    as_json: Json = False,
    write: Write = None,
    force: Annotated[bool, typer.Option("--force", help="Write over a file.")] = False,
    key_env: KeyEnv = None,
    speeds: Annotated[bool, typer.Option(help="Measure speeds with a few short requests.")] = True,
) -> int:
    """Show engines, speeds and roles of running servers, and which pairs can hand off."""
    specs = worker_specs(workers, key_env)
    if write is not None and write.exists() and not force:
        raise WrongUsage(f"{write}: it is there already; name another file, or add --force")
    results = asyncio.run(_probe_all(specs, with_speeds=speeds, quiet=as_json))
    return _show(specs, results, write, as_json=as_json)


def worker_specs(arguments: Sequence[str], key_env: str | None) -> tuple[WorkerSpec, ...]:
    """Read `URL,key=value,...`. Raises WrongUsage and SettingsError."""
    from router.errors import SettingsError
    from router.settings import build

    entries = [_entry(argument, key_env) for argument in arguments]
    for argument, entry in zip(arguments, entries, strict=True):
        try:
            build({"workers": [entry]})
        except SettingsError as error:
            fault = str(error).removeprefix("workers[0]").lstrip(".: ")
            raise WrongUsage(f"{argument}: {fault}") from error
    settings = build({"workers": entries})
    settings.require_keys(os.environ)
    return settings.workers


def _entry(argument: str, key_env: str | None) -> dict[str, Any]:
    url, *facts = argument.split(",")
    entry: dict[str, Any] = {"url": url}
    if key_env is not None:
        entry["key_env"] = key_env
    for fact in facts:
        name, is_pair, value = fact.partition("=")
        if not (is_pair and value):
            raise WrongUsage(f"{argument}: {fact!r} is no key=value; write it like {_EXAMPLE}")
        if name == "kv":
            name = "kv.connector"
        section, _, inner = name.rpartition(".")
        inside = entry.setdefault(section, {}) if section else entry
        inside[inner] = float(value) if name in _NUMBERS and _is_number(value) else value
    return entry


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdecimal()


async def _probe_all(
    specs: Sequence[WorkerSpec], *, with_speeds: bool, quiet: bool
) -> list[Found | ProbeFailed]:
    from router.app import options_of
    from router.cli.console import counted, stderr_console
    from router.fleet_probe import Address, probe_fleet
    from router.origin import parse_origin
    from router.registry import DIALECTS
    from router.upstream import HttpUpstream

    addresses = []
    for spec in specs:
        assert spec.url is not None
        origin = parse_origin(spec.url)
        name = spec.name or origin.url.removeprefix("http://")
        addresses.append(Address(name, origin, options_of(spec, os.environ), spec.role))
    console = stderr_console()
    label = f"asking {counted(len(specs), 'worker')}"
    shown = console.is_terminal and not quiet
    waiting = console.status(label) if shown else contextlib.nullcontext()

    def measuring(name: str) -> None:
        if not isinstance(waiting, contextlib.nullcontext):
            waiting.update(f"measuring {name}")

    with contextlib.closing(HttpUpstream()) as upstream, waiting:
        return await probe_fleet(
            addresses, DIALECTS, upstream, with_speeds=with_speeds, on_step=measuring
        )


def _show(
    specs: Sequence[WorkerSpec],
    results: list[Found | ProbeFailed],
    write: Path | None,
    *,
    as_json: bool,
) -> int:
    import json
    import sys

    from router.cli.console import stdout_console
    from router.cli.probe_file import write_configuration
    from router.cli.probe_tables import document, print_fleet
    from router.errors import ProbeFailed

    found = [each for each in results if not isinstance(each, ProbeFailed)]
    failed = [each for each in results if isinstance(each, ProbeFailed)]
    written = None
    if write is not None and not failed:
        write_configuration(write, specs, found)
        written = write
    if as_json:
        print(json.dumps(document(found, failed, written)))
    elif found:
        print_fleet(stdout_console(), found)
    for each in failed:
        print(f"error: {each}", file=sys.stderr)
    if failed and write is not None:
        print(f"error: {write} is not written; mend or leave out what failed", file=sys.stderr)
    if written is not None and not as_json:
        print(f"\nwritten: {written}; start with: splitserve route -c {written}")
    return 1 if failed else 0
