"""All commands and what becomes of their errors. Commands import what they need when they run."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from router.cli.bench import bench
from router.cli.check import check
from router.cli.courier import courier
from router.cli.demo import demo
from router.cli.errors import CliError, WrongUsage
from router.cli.explain import explain
from router.cli.models import models
from router.cli.probe import probe
from router.cli.route import route
from router.cli.simulate import simulate
from router.cli.up import up
from router.cli.version import version
from router.cli.worker import worker
from router.errors import SettingsError

# typer hands out only one of its usage errors; all of them share its parent.
_USAGE_ERRORS: tuple[type[Exception], ...] = tuple(
    kind
    for kind in typer.BadParameter.__mro__[1:]
    if issubclass(kind, Exception) and kind is not Exception
)

_INTERRUPT_STATUS = 130
_INTERRUPTED = "interrupted before it was done; nothing is left running"


def build_app() -> typer.Typer:
    """Assemble the command line."""
    app = typer.Typer(
        name="splitserve",
        help="OpenAI-compatible serving over unlike machines: "
        "prefill on one worker, decode on another.",
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for command in (up, route, worker, courier, probe, demo, check, explain, simulate, version):
        app.command()(command)
    app.add_typer(models, name="models")
    app.add_typer(bench, name="bench")
    app.callback(invoke_without_command=True)(_root)
    return app


def _root(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


def run(arguments: Sequence[str]) -> int:
    """Run one command. Returns 0 done, 1 failed, 2 wrong usage or configuration."""
    try:
        outcome = build_app()(list(arguments), prog_name="splitserve", standalone_mode=False)
        status = outcome if isinstance(outcome, int) else 0
        # typer turns Ctrl-C into this status, or lets it through as an exception.
        return _fail(_INTERRUPTED, 1) if status == _INTERRUPT_STATUS else status
    except _USAGE_ERRORS as error:
        return _usage(error)
    except (SettingsError, WrongUsage) as error:
        return _fail(str(error), 2)
    except CliError as error:
        return _fail(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return _fail(_INTERRUPTED, 1)
    except BrokenPipeError:
        # Whoever read our output has left; say nothing more, not even at exit.
        sys.stderr.close()
        return 1


def _usage(error: Exception) -> int:
    message = str(error.format_message()) if hasattr(error, "format_message") else str(error)
    if message:  # empty after the help of a group that was named without a command
        print(f"error: {' '.join(message.split())} See splitserve --help.", file=sys.stderr)
    return 2


def _fail(message: str, exit_code: int) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return exit_code
