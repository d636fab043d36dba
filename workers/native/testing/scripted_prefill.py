"""A prefill worker that says whatever a script tells it to, in real frames on a real port."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from workers.native.handoff.errors import HandoffError
from workers.native.handoff.frames import FrameSocket, Kind
from workers.native.handoff.reference import HandoffReference
from workers.native.kv.pool import KvPool


class Peer:
    """What a script gets: the frames, and the bare socket for what is no frame."""

    def __init__(self, sock: socket.socket, pool: KvPool) -> None:
        self.sock = sock
        self.frames = FrameSocket(sock, 20.0)
        self.pool = pool

    def read(self) -> tuple[Kind, dict[str, Any]]:
        """Read one control message."""
        header = self.frames.read_header()
        return header.kind, self.frames.read_control(header)

    def welcome(self, **changes: Any) -> dict[str, Any]:
        """Read HELLO, answer WELCOME, read BEGIN and return it."""
        assert self.read()[0] is Kind.HELLO
        share = {
            "pid": os.getpid(),
            "fd": self.pool.share_fd,
            "token": self.pool.share_token.hex(),
            "blocks": self.pool.blocks,
        }
        told = {"prompt_tokens": 15, "block_bytes": self.pool.layout.block_bytes, "share": share}
        self.frames.send_control(Kind.WELCOME, **(told | changes))
        while True:
            kind, fields = self.read()
            if kind is not Kind.WAIT:
                assert kind is Kind.BEGIN
                return fields

    def send_blocks(self, *numbers: int) -> None:
        """Send blocks of the pool as they are."""
        for number in numbers:
            self.frames.send_bytes(Kind.BLOCK, number, self.pool.host_block(number))

    def wait_for_close(self) -> None:
        """Say nothing until the other side leaves."""
        try:
            while self.sock.recv(4096):
                pass
        except OSError:  # a reset is leaving too
            return


Script = Callable[[Peer], None]


class ScriptedPrefill:
    """Plays `script` to its one caller. Use as a context manager."""

    def __init__(self, pool: KvPool, script: Script) -> None:
        self._pool = pool
        self._script = script
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._play, name="handoff-scripted")
        self.failure: BaseException | None = None

    @property
    def reference(self) -> HandoffReference:
        """Where to pull from."""
        return HandoffReference("offer", "key", "127.0.0.1", self._listener.getsockname()[1])

    def _play(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:  # nobody came
            return
        with sock:
            try:
                self._script(Peer(sock, self._pool))
            except HandoffError:  # the caller left in the middle, as it should
                return
            except BaseException as error:  # task boundary: shown by __exit__
                self.failure = error

    def __enter__(self) -> ScriptedPrefill:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(20.0)
        assert not self._thread.is_alive(), "the script still plays"
        if self.failure is not None and error is None:
            raise self.failure
