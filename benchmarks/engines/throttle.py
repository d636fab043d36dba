"""Makes one process as slow as a weaker machine's: it may compute only a share of the time.

Linux only: it reads the process's CPU clock, and stops and continues it by signals.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from types import TracebackType
from typing import Self

_TICK_S = 0.008
_IDLE_SHARE = 0.05  # of a tick: a process that uses less of it waits for something


class Throttle:
    """Stops a process after every moment in which it computes, for so long that its work takes
    1/`share` as long. While it waits it is left alone. Starts with `with`, lets go at the end.

    It goes by the clock on the wall: on a busy machine the process is slowed down beside what
    the others do to it, so that two of them keep their proportion.
    """

    def __init__(self, pid: int, share: float) -> None:
        assert 0 < share < 1
        self._pid = pid
        self._share = share
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="throttle", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(OSError):  # it has ended
            while not self._ended.is_set():
                begun_s, used_s = time.monotonic(), self._cpu_s()
                time.sleep(_TICK_S)
                ran_s = time.monotonic() - begun_s
                if self._cpu_s() - used_s > _IDLE_SHARE * ran_s:
                    self._stop_for(ran_s * (1 / self._share - 1))

    def _stop_for(self, pause_s: float) -> None:
        os.kill(self._pid, signal.SIGSTOP)
        try:
            self._ended.wait(pause_s)
        finally:
            os.kill(self._pid, signal.SIGCONT)

    def _cpu_s(self) -> float:
        """The process's CPU clock: clock_getcpuclockid(3) of Linux."""
        return time.clock_gettime(~self._pid << 3 | 2)
