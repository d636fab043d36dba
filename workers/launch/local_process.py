"""One process: its group, its log, its health."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from workers.launch.command import filled
from workers.launch.descendants import signal_strays
from workers.launch.errors import CannotStart
from workers.launch.readiness import answers
from workers.launch.worker_log import WorkerLog

START_TIMEOUT_S = 600.0  # weights may come from a hub, and kernels may be compiled
_NO_SIGNAL = 0  # tests whether there is a process to signal
_PORT_IN_USE = "address already in use"
_LAST_LINES = 3


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """What to start. `{port}` and `{host}` in `command` are replaced by where it must listen."""

    name: str
    command: tuple[str, ...]
    role: str = "auto"
    host: str = "127.0.0.1"
    environment: Mapping[str, str] = field(default_factory=dict)
    start_timeout_s: float = START_TIMEOUT_S


class LocalProcess:
    """A process in a session of its own, so that a signal reaches all it has started."""

    def __init__(self, spec: LaunchSpec, port: int, log: WorkerLog) -> None:
        """Start it. Raises CannotStart."""
        self.spec = spec
        self.port = port
        self._log = log
        self._gone = False
        command = [filled(part, spec.host, port) for part in spec.command]
        try:
            with log.begin_run() as output:
                self._popen = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
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

    @property
    def log_path(self) -> Path:
        """Where its output goes."""
        return self._log.path

    def exit_code(self) -> int | None:
        """Return its exit code, negative for a signal, or None while it runs."""
        return self._popen.poll()

    def ready(self) -> bool:
        """Whether it takes requests now, and still runs: another one may have got its port."""
        return answers(self.spec.host, self.port) and self.exit_code() is None

    def last_line(self) -> str:
        """Return the last line it wrote that is not empty."""
        return self._log.last_lines(1)

    def last_lines(self) -> str:
        """Return the last lines it wrote, in one."""
        return self._log.last_lines(_LAST_LINES)

    def lost_its_port(self) -> bool:
        """Whether it says that another process took its port."""
        return _PORT_IN_USE in self._log.tail().lower()

    def signal_group(self, number: signal.Signals | int) -> None:
        """Send a signal to it and to everything it started."""
        if self._gone:
            return
        try:
            if isinstance(number, signal.Signals):
                signal_strays(self.pid, number)
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

    def kill(self) -> None:
        """End it and everything it started, now."""
        self.signal_group(signal.SIGKILL)
        self._popen.wait()  # certain after SIGKILL
        self._gone = True
