"""One supervised process: its group, its log, its health."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from workers.launch.errors import CannotStart

_PROBE_S = 1.0
_TAIL_BYTES = 8192
_NO_SIGNAL = 0  # tests whether there is a process to signal
_PORT_IN_USE = "address already in use"


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """What to start. `{port}` in `command` is replaced by the port chosen for it."""

    name: str
    command: tuple[str, ...]
    role: str = "auto"
    host: str = "127.0.0.1"
    environment: Mapping[str, str] = field(default_factory=dict)


class LocalProcess:
    """A process in a session of its own, so that a signal reaches all it has started."""

    def __init__(self, spec: LaunchSpec, port: int, log_path: Path) -> None:
        """Start it. Raises CannotStart."""
        self.spec = spec
        self.port = port
        self.log_path = log_path
        self._gone = False
        command = [part.replace("{port}", str(port)) for part in spec.command]
        try:
            with log_path.open("wb") as log:
                self._popen = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    env={**os.environ, "PYTHONUNBUFFERED": "1", **spec.environment},
                )
        except OSError as error:
            raise CannotStart(spec.name, str(error)) from error

    @property
    def pid(self) -> int:
        """Its process id, which is its group's too."""
        return self._popen.pid

    @property
    def url(self) -> str:
        """Where it answers."""
        host = f"[{self.spec.host}]" if ":" in self.spec.host else self.spec.host
        return f"http://{host}:{self.port}"

    def exit_code(self) -> int | None:
        """Return its exit code, negative for a signal, or None while it runs."""
        return self._popen.poll()

    def healthy(self) -> bool:
        """Whether GET /health is answered with 200 now, by a process that still runs."""
        connection = http.client.HTTPConnection(self.spec.host, self.port, timeout=_PROBE_S)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200 and self.exit_code() is None
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def last_line(self) -> str:
        """Return the last line of its log that is not empty."""
        lines = [line.strip() for line in self._tail().splitlines()]
        return next((line for line in reversed(lines) if line), "")

    def lost_its_port(self) -> bool:
        """Whether its log says that another process took its port."""
        return _PORT_IN_USE in self._tail().lower()

    def signal_group(self, number: signal.Signals | int) -> None:
        """Send a signal to it and to everything it started that is still in its group."""
        if self._gone:
            return
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):  # macOS refuses a group of zombies
            # Its number is free for other processes now and must not be signalled again.
            self._gone = self.exit_code() is not None

    def group_alive(self) -> bool:
        """Whether it or anything it started and left in its group still runs."""
        if self.exit_code() is None:
            return True
        self.signal_group(_NO_SIGNAL)
        return not self._gone

    def reap(self) -> None:
        """Wait for its end, which is certain after SIGKILL."""
        self._popen.wait()

    def _tail(self) -> str:
        with self.log_path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return log.read().decode(errors="replace")
