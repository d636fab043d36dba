"""`splitserve check`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def check(
    config: Annotated[Path, typer.Option("-c", "--config", help="Configuration file.")],
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the effective configuration as YAML.")
    ] = False,
) -> None:
    """Validate a configuration file."""
    from router.cli.console import counted
    from router.cli.errors import WrongUsage
    from router.cli.local_workers import require_startable
    from router.settings import dump, load

    settings = load(config)
    try:
        require_startable(settings)
    except WrongUsage as error:
        raise WrongUsage(f"{config}: {error}") from error
    if print_config:
        print(dump(settings), end="")
        return
    models = counted(len(settings.models), "model")
    print(f"{config}: ok, {models}, {counted(len(settings.worker_specs), 'worker')}")
