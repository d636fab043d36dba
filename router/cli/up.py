"""`splitserve up`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from router.cli.options import ConfigFile, Host, Port, router_settings

if TYPE_CHECKING:
    from router.cli.local_workers import LocalPlan
    from router.cli.stack import Stack
    from router.settings import RouterSettings

_LOOK_S = 0.5
DEFAULT_MODEL = "smollm2-135m"

Model = Annotated[str, typer.Option(help="A short name, a hub id, a folder or a GGUF file.")]
Threads = Annotated[
    int,
    typer.Option(min=0, help="CPU threads of each worker; 0 shares the cores.", show_default="0"),
]
Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")]
ReadySeconds = Annotated[
    float | None,
    typer.Option(
        "--ready-s",
        min=1,
        help="Seconds that workers may take to start.",
        show_default="600, or start_timeout_s",
    ),
]


def up(
    context: typer.Context,
    *,
    config: ConfigFile = None,
    model: Model = DEFAULT_MODEL,
    prefill: Annotated[int, typer.Option(min=0, help="Workers that prefill.")] = 1,
    decode: Annotated[int, typer.Option(min=0, help="Workers that decode.")] = 1,
    aggregated: Annotated[int, typer.Option(min=0, help="Workers that do both.")] = 0,
    host: Host = None,
    port: Port = None,
    threads_per_worker: Threads = 0,
    device: Device = "cpu",
    ready_s: ReadySeconds = None,
) -> int:
    """Run everything on this machine: workers and router. Ctrl-C drains and ends it."""
    from router.cli.local_workers import NativeWish, file_plan, native_plan
    from router.cli.serving import interrupt_on_signals, require_port
    from router.cli.stack import run_stack

    settings = router_settings(config, host, port)
    interrupt_on_signals()
    if settings.worker_specs:
        _refuse_native_options(context, settings)
        plan: LocalPlan = file_plan(settings)
    else:
        counts = {"prefill": prefill, "decode": decode, "aggregated": aggregated}
        wish = NativeWish(model, counts, threads_per_worker, device)
        wish.check()
        require_port(settings)  # before minutes of work for nothing
        plan = native_plan(settings, wish)
    return run_stack(plan.allowing(ready_s), stay_up)


def _refuse_native_options(context: typer.Context, settings: RouterSettings) -> None:
    from router.cli.errors import WrongUsage

    native = ("model", "prefill", "decode", "aggregated", "threads_per_worker", "device")
    for name in native:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise WrongUsage(
                f"--{name.replace('_', '-')} goes with native workers, but the file names its own "
                "workers; leave the option out, or the workers"
            )


def stay_up(stack: Stack) -> None:
    """Show what runs, then keep it running until everything ends."""
    show_workers(stack)
    while not stack.ending.wait(_LOOK_S):
        stack.supervise()


def show_workers(stack: Stack) -> None:
    """Print the workers and the URL."""
    from router.cli.console import stdout_console, table

    local = {process.spec.name: process for process in stack.fleet.processes}
    console = stdout_console()
    rows = table(console, "worker", "role", "model", "address", "pid", "log", right=(4,))
    for spec in stack.settings.worker_specs:
        process = local.get(spec.name or "")
        rows.add_row(
            spec.name or "",
            spec.role,
            spec.model or "found by probing",
            spec.url,
            str(process.pid) if process else "",
            str(process.log_path) if process else "",
        )
    console.print(rows)
    console.print(f"ready on {stack.url}/v1", markup=False)
