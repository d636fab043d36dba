"""Several local processes that start together, are kept running, and end together."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from workers.launch.backoff import Backoff
from workers.launch.errors import NotReady, WorkerExited
from workers.launch.local_process import LaunchSpec, LocalProcess
from workers.launch.ports import free_ports
from workers.launch.supervision import Supervision
from workers.launch.worker_log import WorkerLog

_POLL_S = 0.05
_ASK_MOST_S = 1.0
_PORT_TRIES = 3


class Fleet:
    """Starts processes side by side; as a context it leaves none of them behind.

    `grace_s` passes between SIGTERM and SIGKILL. Not for use from several threads, except
    `supervise`, which one other thread may call: once `stop` has begun it starts nothing more.
    """

    def __init__(
        self,
        specs: Sequence[LaunchSpec],
        log_folder: Path,
        *,
        grace_s: float = 8.0,
        backoff: Callable[[], Backoff] = lambda: Backoff(random.Random()),
    ) -> None:
        self._specs = list(specs)
        self._logs = [WorkerLog(log_folder / f"{spec.name}.log") for spec in specs]
        self._grace_s = grace_s
        self._backoff = backoff
        self._supervised: dict[int, Supervision] = {}
        self._stopping = False
        self._lock = threading.Lock()
        self.processes: list[LocalProcess] = []

    def __enter__(self) -> Self:
        """Start every process; it is not ready yet, see `wait_ready`. Raises CannotStart."""
        try:
            ports = free_ports([spec.host for spec in self._specs])
            for spec, port, log in zip(self._specs, ports, self._logs, strict=True):
                self.processes.append(LocalProcess(spec, port, log))
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.stop()

    def wait_ready(self, on_ready: Callable[[LocalProcess], None] | None = None) -> None:
        """Wait until every process takes requests; `on_ready` is told of each.

        One that ended because its port was taken meanwhile is started again on another.
        Raises WorkerExited and NotReady.
        """
        begun_s = time.monotonic()
        pending = dict.fromkeys(range(len(self.processes)), _PORT_TRIES - 1)
        ask_at_s = begun_s
        while pending:
            now_s = time.monotonic()
            waited_s, ask = now_s - begun_s, now_s >= ask_at_s
            if ask:  # ever more seldom, since engines log each question
                ask_at_s = now_s + min(_ASK_MOST_S, waited_s / 10)
            for index in list(pending):
                process = self.processes[index]
                allowed_s = process.spec.start_timeout_s
                if ask and process.ready():
                    del pending[index]
                    self._supervised[index] = self._supervision(index)
                    if on_ready is not None:
                        on_ready(process)
                elif process.exit_code() is not None:
                    self._start_elsewhere(index, pending[index])
                    pending[index] -= 1
                elif waited_s > allowed_s:
                    name, said = process.spec.name, process.last_lines()
                    raise NotReady(name, allowed_s, said, process.log_path)
            self._trim_logs()
            if pending:
                time.sleep(_POLL_S)

    def supervise(self) -> list[str]:
        """Start again what has ended, after a while. Returns what has happened, one line each."""
        with self._lock:
            if self._stopping:
                return []
            self._trim_logs()
            now_s = time.monotonic()
            lines = [each.look(now_s) for each in self._supervised.values()]
        return [line for line in lines if line]

    def stop(self) -> None:
        """End every process and all it started: SIGTERM, `grace_s` later SIGKILL.

        An interrupt while waiting (a second Ctrl-C) cuts the grace short.
        """
        self._stopping = True
        try:
            with self._lock:  # whoever starts one again has done so
                for process in self.processes:
                    process.signal_group(signal.SIGTERM)
            self._wait_gone()
        finally:
            for process in self.processes:
                process.kill()

    def _wait_gone(self) -> None:
        deadline_s = time.monotonic() + self._grace_s
        while any(process.group_alive() for process in self.processes):
            if time.monotonic() > deadline_s:
                return
            time.sleep(_POLL_S)

    def _trim_logs(self) -> None:
        for log in self._logs:
            log.trim()

    def _supervision(self, index: int) -> Supervision:
        process = self.processes[index]

        def start() -> LocalProcess:
            self.processes[index] = LocalProcess(process.spec, process.port, self._logs[index])
            return self.processes[index]

        return Supervision(
            process.spec.name,
            process,
            start,
            self._backoff(),
            now_s=time.monotonic(),
            start_timeout_s=process.spec.start_timeout_s,
        )

    def _start_elsewhere(self, index: int, tries_left: int) -> None:
        process = self.processes[index]
        code = process.exit_code()
        assert code is not None
        process.kill()
        if tries_left == 0 or not process.lost_its_port():
            raise WorkerExited(process.spec.name, code, process.last_lines(), process.log_path)
        port = free_ports([process.spec.host])[0]
        self.processes[index] = LocalProcess(process.spec, port, self._logs[index])
