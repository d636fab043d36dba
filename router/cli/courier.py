"""`splitserve courier`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from router.cli.errors import WrongUsage

_GIB = 1 << 30


def courier(
    *,
    folder: Annotated[Path, typer.Option(help="The llama-server's --slot-save-path.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 8090,
    key_env: Annotated[
        str, typer.Option(help="The environment variable with the key that the router shows.")
    ] = "",
    max_bytes: Annotated[
        int, typer.Option(min=1, help="Most bytes of slot files.", show_default="8 GiB")
    ] = 8 * _GIB,
    max_age_s: Annotated[
        float, typer.Option(help="Seconds after which a slot file is removed.")
    ] = 300.0,
    model: Annotated[
        Path | None, typer.Option(help="The llama-server's GGUF file, to tell models apart.")
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(help="A courier to fetch from; may be repeated. None: see the key."),
    ] = None,
    examples: Annotated[
        Path | None,
        typer.Option(help="The shared_storage_path of a vLLM worker whose KV to convert."),
    ] = None,
) -> int:
    """Move slot files for one llama-server."""
    from workers.courier.service import run
    from workers.courier.settings import CourierSettings
    from workers.errors import BadSetting

    key = os.environ.get(key_env, "") if key_env else ""
    if key_env and not key:
        raise WrongUsage(f"--key-env: {key_env} is not set or empty; put the courier's key there")
    try:
        settings = CourierSettings(
            folder=folder,
            host=host,
            port=port,
            key=key,
            max_bytes=max_bytes,
            max_age_s=max_age_s,
            peers=tuple(peer or ()),
            model=model,
            examples=examples,
        )
    except BadSetting as error:
        raise WrongUsage(f"--{error}") from error
    return run(settings)
