"""A child process with all that it starts: its CPU time and memory, its start and its end."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from benchmarks.errors import NotMeasurable, SystemFailed

READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 15.0
POLL_S = 0.1


def free_port() -> int:
    """A loopback port that is free now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


class ProcessTree:
    """A command running in a session of its own, its output in a file.

    Linux only: CPU time and memory are read from the kernel's own accounts.
    """

    def __init__(
        self, name: str, command: Sequence[str], environ: Mapping[str, str] | None = None
    ) -> None:
        if not sys.platform.startswith("linux"):
            raise NotMeasurable(
                f"CPU time of {name} cannot be read on {sys.platform}; run this on Linux"
            )
        self.name = name
        self._output = tempfile.NamedTemporaryFile("w+b", prefix=f"{name}-", suffix=".log")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def wait_ready(self, url: str, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Return once ``url`` answers 200. Raises SystemFailed, with the last line of output."""
        end_s = time.monotonic() + timeout_s
        while time.monotonic() < end_s:
            if self._process.poll() is not None:
                raise SystemFailed(
                    f"{self.name} ended with {self._process.returncode}: {self._last()}"
                )
            try:
                with urllib.request.urlopen(url, timeout=2) as reply:
                    if reply.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                pass
            time.sleep(POLL_S)
        raise SystemFailed(f"{self.name} is not ready after {timeout_s:g} s: {self._last()}")

    def cpu_s(self) -> float:
        """CPU seconds, user and system, of all its threads and living descendants."""
        return sum(_cpu_s(pid) for pid in self._pids())

    def rss_bytes(self) -> int:
        """Resident memory of the process and its descendants; shared pages count in each."""
        page_bytes = os.sysconf("SC_PAGE_SIZE")
        statm = (Path(f"/proc/{pid}/statm").read_text(encoding="ascii") for pid in self._pids())
        return sum(int(text.split()[1]) for text in statm) * page_bytes

    def stop(self) -> None:
        """End it by SIGTERM, and what is left of its session after a while by SIGKILL."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._output.close()

    def _pids(self) -> list[int]:
        found = [self._process.pid]
        for pid in found:
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                found += [int(child) for child in children.read_text(encoding="ascii").split()]
        return found

    def _last(self) -> str:
        lines = Path(self._output.name).read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")


def _cpu_s(pid: int) -> float:
    """The process's CPU clock, in nanosecond steps: clock_getcpuclockid(3) of Linux."""
    return time.clock_gettime(~pid << 3 | 2)
