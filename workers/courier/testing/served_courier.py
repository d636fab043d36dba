"""A courier on a loopback port, in a thread of its own::

with ServedCourier(tmp_path / "slots", key="k") as courier:
    ...                                  # talk to courier.url
"""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import uvicorn

from workers.courier.service import build
from workers.courier.settings import CourierSettings

_WAIT_S = 20.0


class ServedCourier:
    """Starts with `with`. `more` are settings of the courier; its folder is made if missing."""

    def __init__(self, folder: Path, *, listen_port: int = 0, **more: Any) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._settings = CourierSettings(folder, **more)
        self._socket = socket.create_server(("127.0.0.1", listen_port))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def __enter__(self) -> Self:
        config = uvicorn.Config(
            build(self._settings), log_level="warning", access_log=False, ws="none"
        )
        self._server = _Announcing(config)
        run = {"sockets": [self._socket]}
        self._thread = threading.Thread(target=self._server.run, kwargs=run, name="courier")
        self._thread.start()
        assert self._server.up.wait(_WAIT_S), "the courier did not start"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End it as SIGTERM would; once more is no error."""
        self._server.should_exit = True
        self._thread.join(_WAIT_S)
        assert not self._thread.is_alive(), "the courier did not end"

    def files(self) -> list[str]:
        """Names of the router's files in the folder, unfinished ones included."""
        return sorted(each.name for each in self.folder.glob("splitserve-*"))


class _Announcing(uvicorn.Server):
    """Says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = threading.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then say so."""
        await super().startup(sockets)
        self.up.set()
