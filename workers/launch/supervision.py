"""Keeps one worker running: what to do when it ends, and what to say of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from workers.launch.backoff import Backoff
from workers.launch.errors import SILENT, CannotStart, ending, unready


class Run(Protocol):
    """One run of a worker, from its start to its end."""

    @property
    def pid(self) -> int: ...
    @property
    def log_path(self) -> Path: ...
    def exit_code(self) -> int | None: ...
    def ready(self) -> bool: ...
    def last_line(self) -> str: ...
    def kill(self) -> None: ...


class Supervision:
    """Looks after a worker whose first run is ready. Call `look` about twice a second.

    `start` begins another run at the same address. Its failures wait as `backoff` says, without
    end: an engine may come back when a driver, a disk or a neighbour does. Times are seconds on
    any one clock.
    """

    def __init__(
        self,
        name: str,
        run: Run,
        start: Callable[[], Run],
        backoff: Backoff,
        *,
        now_s: float,
        start_timeout_s: float,
    ) -> None:
        self._name = name
        self._run: Run | None = run
        self._log_path = run.log_path
        self._start = start
        self._backoff = backoff
        self._start_timeout_s = start_timeout_s
        self._ready_at_s: float | None = now_s
        self._begun_at_s = now_s
        self._start_at_s = now_s

    def look(self, now_s: float) -> str:
        """Do what is due. Returns one line when something has happened, else ""."""
        if self._run is None:
            return self._start_again(now_s) if now_s >= self._start_at_s else ""
        code = self._run.exit_code()
        if code is not None:
            said = self._run.last_line() or SILENT
            self._run.kill()  # what it may have left behind
            return self._wait(now_s, f"worker {self._name} {ending(code)}: {said}")
        if self._ready_at_s is not None:
            return ""
        if self._run.ready():
            self._ready_at_s = now_s
            return f"worker {self._name} is ready again (pid {self._run.pid})"
        if now_s - self._begun_at_s > self._start_timeout_s:
            said = self._run.last_line() or SILENT
            self._run.kill()
            return self._wait(
                now_s, f"worker {self._name} {unready(self._start_timeout_s)}: {said}"
            )
        return ""

    def _start_again(self, now_s: float) -> str:
        self._ready_at_s = None
        try:
            self._run = self._start()
        except CannotStart as error:
            return self._wait(now_s, str(error))
        self._begun_at_s = now_s
        return ""

    def _wait(self, now_s: float, cause: str) -> str:
        ready_s = 0.0 if self._ready_at_s is None else now_s - self._ready_at_s
        delay_s = self._backoff.next_s(ready_s)
        self._run, self._ready_at_s = None, None
        self._start_at_s = now_s + delay_s
        return (
            f"{cause}; it is started again in {delay_s:.1f} s "
            f"(failure {self._backoff.failures}); its log is {self._log_path}"
        )
