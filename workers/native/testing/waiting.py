"""Waiting for what another thread does, where there is no event to wait on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

_PAUSE_S = 0.002


def until(holds: Callable[[], bool], what: str, timeout_s: float = 5.0) -> None:
    """Return as soon as `holds()` is true. Raises AssertionError naming `what` when it is not."""
    never = threading.Event()
    for _ in range(int(timeout_s / _PAUSE_S)):
        if holds():
            return
        never.wait(_PAUSE_S)
    raise AssertionError(f"not within {timeout_s:g} s: {what}")


def thread_names(*prefixes: str) -> list[str]:
    """Names of living threads that begin with one of `prefixes`."""
    return sorted(t.name for t in threading.enumerate() if t.name.startswith(prefixes))


def open_files() -> int:
    """Descriptors of this process."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())
