"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from router.settings import RouterSettings

DEFAULT_URL = "http://127.0.0.1:8000"

ConfigFile = Annotated[
    Path | None, typer.Option("-c", "--config", help="Configuration file.", show_default=False)
]
Host = Annotated[str | None, typer.Option(help="Address to listen on.", show_default="127.0.0.1")]
Port = Annotated[
    int | None, typer.Option(min=1, max=65535, help="Port to listen on.", show_default="8000")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]


def router_settings(
    config: Path | None, host: str | None = None, port: int | None = None
) -> RouterSettings:
    """Read the file, or take the defaults; options go before both. Raises SettingsError."""
    from router.settings import Listen, build, load

    settings = load(config) if config is not None else build({})
    listen = Listen(
        host=settings.listen.host if host is None else host.strip("[]"),
        port=settings.listen.port if port is None else port,
    )
    return settings.model_copy(update={"listen": listen})
