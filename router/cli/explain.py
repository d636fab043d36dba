"""`splitserve explain`."""

from __future__ import annotations

from typing import Annotated

import typer

from router.cli.options import DEFAULT_URL, Json


def explain(
    request_id: Annotated[str, typer.Argument(metavar="ID", help="The answer's x-request-id.")],
    url: Annotated[str, typer.Option(help="The router.")] = DEFAULT_URL,
    key_env: Annotated[
        str, typer.Option(help="Environment variable with the admin key.")
    ] = "SPLITSERVE_ADMIN_KEY",
    as_json: Json = False,
) -> None:
    """Show why a request went where it went, and what came of it."""
    import json

    from router.cli.console import stdout_console
    from router.cli.decision import candidates_table, outcome_table, summary
    from router.cli.router_client import RouterClient, admin_key

    with RouterClient(url, admin_key(key_env)) as client:
        record = client.decision(request_id)
    if as_json:
        print(json.dumps(record))
        return
    console = stdout_console()
    console.print(f"{summary(record)}\n", markup=False)
    console.print(outcome_table(console, record))
    console.print()
    console.print(candidates_table(console, record))
