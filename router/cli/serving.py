"""Running the router in this process, on a port known to be free."""

from __future__ import annotations

import logging
import os
import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING

from router.cli.errors import CommandFailed

if TYPE_CHECKING:
    from router.settings import RouterSettings

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def require_port(settings: RouterSettings) -> None:
    """Raise CommandFailed when the router could not listen where it should."""
    from workers.launch.errors import LaunchError
    from workers.launch.ports import require_free

    try:
        require_free(settings.listen.host, settings.listen.port)
    except LaunchError as error:
        raise CommandFailed(str(error)) from error


def interrupt_on_signals() -> None:
    """Make SIGTERM and SIGINT a KeyboardInterrupt, so that both unwind through every cleanup.

    A hang-up of the terminal is a SIGTERM, unless somebody has said otherwise (as nohup does).
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _interrupt)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, _hang_up)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _hang_up(number: int, frame: FrameType | None) -> None:
    signal.raise_signal(signal.SIGTERM)


def serve_router(settings: RouterSettings) -> int:
    """Serve until SIGTERM or SIGINT, then drain. Returns the exit status. Raises SettingsError."""
    settings.require_keys(os.environ)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format=LOG_FORMAT)
    interrupt_on_signals()
    try:
        from router.app import serve

        return serve(settings)
    except KeyboardInterrupt:
        # The server has drained by now and raises the signal that ended it once more.
        return 0
