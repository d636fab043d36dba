"""`splitserve worker`."""

from __future__ import annotations

from typing import Annotated

import typer

from router.cli.errors import WrongUsage


def worker(
    *,
    model: Annotated[
        str, typer.Option(help="A short name, a hub id, a folder or a GGUF file.")
    ] = "smollm2-135m",
    role: Annotated[str, typer.Option(help="aggregated, prefill, decode or auto.")] = "aggregated",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 8001,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0: torch's choice.")] = 0,
    kv_tokens: Annotated[int, typer.Option(min=1, help="Tokens of KV cache.")] = 32768,
    step_tokens: Annotated[int, typer.Option(min=1, help="Most tokens in one step.")] = 512,
    max_running: Annotated[int, typer.Option(min=1, help="Most requests at a time.")] = 64,
    served_name: Annotated[
        str, typer.Option(help="The name clients ask for.", show_default="the model's")
    ] = "",
) -> int:
    """Run one native worker."""
    from workers.app import run
    from workers.errors import BadSetting
    from workers.settings import WorkerSettings

    try:
        settings = WorkerSettings(
            model=model,
            role=role,
            host=host,
            port=port,
            device=device,
            dtype=dtype,
            threads=threads,
            kv_tokens=kv_tokens,
            step_tokens=step_tokens,
            max_running=max_running,
            served_name=served_name,
        )
    except BadSetting as error:
        raise WrongUsage(f"--{error}") from error
    return run(settings)
