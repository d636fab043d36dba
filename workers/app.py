"""One worker process, from settings to exit status. The engine is imported only here."""

from __future__ import annotations

import importlib.util
import logging
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType

from workers.launch.errors import LaunchError
from workers.launch.ports import require_free
from workers.parent import leave_with
from workers.settings import WorkerSettings

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def run(settings: WorkerSettings) -> int:
    """Run a native worker until SIGTERM or SIGINT. Returns 0, or 1 after one line on stderr."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format=LOG_FORMAT)
    if settings.parent_pid:
        # Before the imports below, which take seconds.
        leave_with(settings.parent_pid)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _interrupt)
    try:
        return _serve(settings)
    except KeyboardInterrupt:
        return 0


def _interrupt(number: int, frame: FrameType | None) -> None:
    # The server raises its signal again once it has drained; as an exception it unwinds through
    # the worker's cleanup, where the default action of SIGTERM would end the process at once.
    raise KeyboardInterrupt


def _serve(settings: WorkerSettings) -> int:
    if importlib.util.find_spec("torch") is None:
        return _fail("the native engine needs torch; pip install 'splitserve[native]'")
    try:
        require_free(settings.host, settings.port)
    except LaunchError as error:
        return _fail(str(error))
    from workers.native.model_store import ConsoleReporter, model_hash, resolve  # noqa: PLC0415
    from workers.native.model_store.errors import ModelStoreError  # noqa: PLC0415
    from workers.native.models.errors import ModelError  # noqa: PLC0415

    try:
        folder: Path = resolve(settings.model, reporter=ConsoleReporter()).path
        digest = model_hash(folder, ConsoleReporter())
        from workers.native.device import why_missing  # noqa: PLC0415

        if missing := why_missing(settings.device):
            return _fail(missing)
        from workers.native import worker  # noqa: PLC0415

        return worker.serve(replace(settings, parent_pid=0), folder, digest)
    except (ModelStoreError, ModelError) as error:
        return _fail(str(error))


def _fail(message: str) -> int:
    print(f"error: {message}", file=sys.stderr)  # noqa: T201
    return 1
