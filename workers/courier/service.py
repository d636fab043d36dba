"""One courier process, from settings to exit status."""

from __future__ import annotations

import logging
import signal
import sys
from types import FrameType

import uvicorn
from fastapi import FastAPI

from workers.courier.app import Courier, create_app
from workers.courier.conversion import Converter
from workers.courier.errors import CourierError
from workers.courier.model_file import describe
from workers.courier.peers import Peers
from workers.courier.settings import CourierSettings
from workers.courier.store import Store
from workers.courier.transfer import Puller
from workers.launch.errors import LaunchError
from workers.launch.ports import require_free

log = logging.getLogger("splitserve.courier")

_DRAIN_S = 5


def build(settings: CourierSettings) -> FastAPI:
    """Build the application.

    Raises OSError when the folder or the model cannot be read, CannotConvert when the model's KV
    can be made of no other engine's.
    """
    store = Store(settings.folder, settings.max_bytes, settings.max_age_s)
    puller = Puller(store, Peers(settings.peers, keyed=bool(settings.key)))
    model = None if settings.model is None else describe(settings.model)
    converter = Converter(store, settings.examples, settings.model)
    converter.prepare()
    return create_app(Courier(store, puller, settings.key, model, converter))


def run(settings: CourierSettings) -> int:
    """Serve until SIGTERM or SIGINT. Returns 0, or 1 after one line on stderr."""
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format=form)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _interrupt)
    try:
        require_free(settings.host, settings.port)
        app = build(settings)
    except (LaunchError, CourierError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return 1
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=_DRAIN_S,
        timeout_keep_alive=75,
    )
    server = uvicorn.Server(config)
    log.info("courier of %s on http://%s:%d", settings.folder, settings.host, settings.port)
    try:
        server.run()
    except KeyboardInterrupt:
        return 0
    return 0 if server.started else 1


def _interrupt(number: int, frame: FrameType | None) -> None:
    # The server raises its signal again once it has drained; the default action would show.
    raise KeyboardInterrupt
