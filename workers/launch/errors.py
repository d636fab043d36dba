"""Errors of starting workers.

LaunchError
├── PortTaken       no server can listen there
├── CannotStart     the operating system refuses the command or the log file
├── WorkerExited    it ended before it was ready
└── NotReady        it took no requests in time
"""

from __future__ import annotations

from pathlib import Path

from workers.errors import WorkerError


class LaunchError(WorkerError):
    """Root of what starting workers raises; its text is one line: which, cause, mend."""


class PortTaken(LaunchError):
    """No server can listen there; mostly because another one does."""

    def __init__(self, host: str, port: int, reason: str, mend: str) -> None:
        super().__init__(f"port {port} on {host} cannot be used ({reason}); {mend}")
        self.port = port


class CannotStart(LaunchError):
    """The operating system refuses the command or the log file."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"worker {name} cannot be started: {reason}; mend its command")


class WorkerExited(LaunchError):
    """It ended before it was ready."""

    def __init__(self, name: str, exit_code: int, last_lines: str, log_path: Path) -> None:
        super().__init__(
            f"worker {name} {ending(exit_code)} before it was ready: "
            f"{last_lines or SILENT}; its log is {log_path}"
        )
        self.exit_code = exit_code


class NotReady(LaunchError):
    """It took no requests in time."""

    def __init__(self, name: str, allowed_s: float, last_lines: str, log_path: Path) -> None:
        super().__init__(
            f"worker {name} {unready(allowed_s)}, last said: {last_lines or 'nothing'}; read its "
            f"log {log_path}, or allow more with start_timeout_s on its entry or --ready-s"
        )


SILENT = "it said nothing"


def ending(exit_code: int) -> str:
    """Say how a process ended; a negative code is the signal that ended it, as is 128 + N."""
    if exit_code < 0:
        return f"was ended by signal {-exit_code}"
    by_signal = f" (signal {exit_code - 128})" if exit_code > 128 else ""
    return f"ended with exit code {exit_code}{by_signal}"


def unready(allowed_s: float) -> str:
    """Say that a process took no requests in time."""
    return f"did not answer /health within {allowed_s:g} s"
