"""Several local processes that start together and end together."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from workers.launch.errors import NotReady, WorkerExited
from workers.launch.local_process import LaunchSpec, LocalProcess
from workers.launch.ports import free_ports

_POLL_S = 0.05
_PORT_TRIES = 3


class Fleet:
    """Starts processes side by side; as a context it leaves none of them behind.

    `grace_s` passes between SIGTERM and SIGKILL. Not for use from several threads, except
    `newly_ended`, which one other thread may call.
    """

    def __init__(
        self,
        specs: Sequence[LaunchSpec],
        log_folder: Path,
        *,
        ready_s: float = 300.0,
        grace_s: float = 8.0,
    ) -> None:
        self._specs = list(specs)
        self._log_folder = log_folder
        self._ready_s = ready_s
        self._grace_s = grace_s
        self._seen_ended: set[int] = set()
        self.processes: list[LocalProcess] = []

    def __enter__(self) -> Self:
        """Start every process; it is not ready yet, see `wait_ready`. Raises CannotStart."""
        try:
            ports = free_ports([spec.host for spec in self._specs])
            for spec, port in zip(self._specs, ports, strict=True):
                self.processes.append(self._start(spec, port))
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.stop()

    def wait_ready(self, on_ready: Callable[[LocalProcess], None] | None = None) -> None:
        """Wait until every process answers /health; `on_ready` is told of each.

        One that ended because its port was taken meanwhile is started again on another.
        Raises WorkerExited and NotReady.
        """
        deadline_s = time.monotonic() + self._ready_s
        pending = dict.fromkeys(range(len(self.processes)), _PORT_TRIES - 1)
        while pending:
            for index in list(pending):
                process = self.processes[index]
                if process.healthy():
                    del pending[index]
                    if on_ready is not None:
                        on_ready(process)
                elif process.exit_code() is not None:
                    self._start_again(index, pending[index])
                    pending[index] -= 1
                elif time.monotonic() > deadline_s:
                    raise NotReady(
                        process.spec.name, self._ready_s, process.last_line(), process.log_path
                    )
            if pending:
                time.sleep(_POLL_S)

    def newly_ended(self) -> list[LocalProcess]:
        """Return the processes that have ended since the last call."""
        ended = [
            process
            for process in self.processes
            if process.pid not in self._seen_ended and process.exit_code() is not None
        ]
        for process in ended:
            self._seen_ended.add(process.pid)
            process.signal_group(signal.SIGKILL)  # what it may have left behind
        return ended

    def stop(self) -> None:
        """End every process and all it started: SIGTERM, `grace_s` later SIGKILL.

        An interrupt while waiting (a second Ctrl-C) cuts the grace short.
        """
        try:
            for process in self.processes:
                process.signal_group(signal.SIGTERM)
            self._wait_gone()
        finally:
            for process in self.processes:
                process.signal_group(signal.SIGKILL)
            for process in self.processes:
                process.reap()

    def _wait_gone(self) -> None:
        deadline_s = time.monotonic() + self._grace_s
        while any(process.group_alive() for process in self.processes):
            if time.monotonic() > deadline_s:
                return
            time.sleep(_POLL_S)

    def _start(self, spec: LaunchSpec, port: int) -> LocalProcess:
        return LocalProcess(spec, port, self._log_folder / f"{spec.name}.log")

    def _start_again(self, index: int, tries_left: int) -> None:
        process = self.processes[index]
        code = process.exit_code()
        assert code is not None
        process.signal_group(signal.SIGKILL)
        if tries_left == 0 or not process.lost_its_port():
            raise WorkerExited(process.spec.name, code, process.last_line(), process.log_path)
        self.processes[index] = self._start(process.spec, free_ports([process.spec.host])[0])
