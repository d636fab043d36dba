"""`splitserve route`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from router.cli.errors import WrongUsage
from router.cli.options import ConfigFile, Host, Port, router_settings

if TYPE_CHECKING:
    from router.settings import RouterSettings, WorkerSpec

Urls = list[str]


def route(
    *,
    config: ConfigFile = None,
    worker: Annotated[
        Urls, typer.Option(metavar="URL", help="A backend for both phases; repeat for more.")
    ] = [],  # noqa: B006 - typer reads it and never changes it
    prefill: Annotated[
        Urls, typer.Option(metavar="URL", help="A backend that prefills; repeat for more.")
    ] = [],  # noqa: B006
    decode: Annotated[
        Urls, typer.Option(metavar="URL", help="A backend that decodes; repeat for more.")
    ] = [],  # noqa: B006
    host: Host = None,
    port: Port = None,
) -> int:
    """Run the router in front of running backends, and of those the file says how to start."""
    from router.cli.console import counted, stderr_console
    from router.cli.local_workers import file_plan
    from router.cli.serving import require_port, serve_router
    from router.cli.stack import run_stack
    from router.cli.up import stay_up

    settings = router_settings(config, host, port)
    roles = {"aggregated": worker, "prefill": prefill, "decode": decode}
    settings = with_backends(settings, roles)
    if any(spec.start is not None for spec in settings.worker_specs):
        return run_stack(file_plan(settings), stay_up)
    require_port(settings)
    backends = counted(len(settings.worker_specs), "worker")
    stderr_console().print(f"router on {settings.listen.url} in front of {backends}")
    return serve_router(settings)


def with_backends(settings: RouterSettings, roles: dict[str, Urls]) -> RouterSettings:
    """Add the backends named by options. Raises SettingsError and WrongUsage."""
    from router.errors import BadWorkerUrl
    from router.origin import parse_origin
    from router.settings import build

    named = [{"url": url, "role": role} for role, urls in roles.items() for url in urls]
    for each in named:
        try:
            parse_origin(each["url"])
        except BadWorkerUrl as error:
            raise WrongUsage(str(error)) from error
    added: tuple[WorkerSpec, ...] = build({"workers": named}).workers
    settings = settings.model_copy(update={"workers": (*settings.workers, *added)})
    if not settings.worker_specs:
        raise WrongUsage(
            "route has no backend; give --worker URL, --prefill URL and --decode URL, or -c FILE"
        )
    return settings
