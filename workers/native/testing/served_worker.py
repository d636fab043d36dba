"""A whole native worker with a tiny model, listening on this machine, whose model can be held."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import uvicorn
from torch import Tensor

from workers.native.engine.core import Model
from workers.native.models.kv_session import KvSession
from workers.native.server.app import create_app
from workers.native.testing.waiting import until
from workers.native.worker import build
from workers.settings import WorkerSettings

MODEL = "tiny"
_WAIT_S = 20.0


class Gate:
    """A model whose steps can be held back, to catch a request in the middle."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._changed = threading.Condition()
        self._left: int | None = None
        self.held = 0
        self.fail_next = False

    def forward(
        self, tokens: Tensor, positions: Tensor, kv: KvSession, logit_rows: Tensor
    ) -> Tensor:
        """See `Decoder.forward`."""
        with self._changed:
            if self._left == 0:
                self.held += 1
                self._changed.notify_all()
                assert self._changed.wait_for(lambda: self._left != 0, _WAIT_S), "held too long"
            if self._left is not None:
                self._left -= 1
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("this step was told to fail")
        return self._model.forward(tokens, positions, kv, logit_rows)

    def hold(self, after_steps: int = 0) -> None:
        """Let so many steps pass, one that is held included, then hold the next one."""
        with self._changed:
            self._left, self.held = after_steps, 0
            self._changed.notify_all()

    def wait_held(self) -> None:
        """Wait until a step is held."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.held > 0, _WAIT_S), "no step came"

    def release(self) -> None:
        """Let everything pass."""
        with self._changed:
            self._left = None
            self._changed.notify_all()


class ServedWorker:
    """Starts at once; `stop` ends it. `url` has no slash at its end."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.worker = build(WorkerSettings(model=MODEL, **settings), folder, "hash")
        self.engine = self.worker.engine
        core = self.engine._core
        self.gate = Gate(core._model)
        core._model = self.gate
        self.worker.start()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        config = uvicorn.Config(
            create_app(self.worker.service), log_level="warning", access_log=False, ws="none"
        )
        self._server = uvicorn.Server(config)
        run = {"sockets": [self._socket]}
        self._thread = threading.Thread(target=self._server.run, kwargs=run, name="http")
        self._thread.start()
        until(lambda: self._server.started, "the server listens")

    def finished(self, reason: str) -> int:
        """Choices that ended for `reason` so far."""
        return self.engine.stats().finished.get(reason, 0)

    def idle(self) -> bool:
        """Whether nothing runs, waits or holds KV."""
        stats = self.engine.stats()
        return not (stats.running or stats.waiting or stats.kv_used_tokens)

    def stop(self) -> None:
        """End it as SIGTERM would."""
        self.gate.release()
        self._server.should_exit = True
        self._thread.join(_WAIT_S)
        assert not self._thread.is_alive(), "the server did not end"
        self.worker.stop()
