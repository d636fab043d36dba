"""The processes that a process has started, also those that have left its process group.

Linux only, where /proc tells and `PR_SET_CHILD_SUBREAPER` (prctl(2)) keeps those whose own parent
has ended below us. Elsewhere nothing is found, and process groups alone must do.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import NamedTuple

_PR_SET_CHILD_SUBREAPER = 36
_ROUNDS = 10  # a process may be born while its parent is being killed


class _Process(NamedTuple):
    pid: int
    parent: int
    group: int


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends. Whoever does must wait(2)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def signal_strays(pid: int, number: signal.Signals) -> None:
    """Send a signal to the descendants of `pid` that are not in the group it leads."""
    for _ in range(_ROUNDS if number is signal.SIGKILL else 1):
        strays = [each.pid for each in _descendants(pid) if each.group != pid]
        for stray in strays:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(stray, number)
        if not strays:
            return


def _descendants(pid: int) -> list[_Process]:
    running = _running()
    found: list[_Process] = []
    pending = [pid]
    while pending:
        parent = pending.pop()
        children = [each for each in running if each.parent == parent]
        found += children
        pending += [each.pid for each in children]
    return found


def _running() -> list[_Process]:
    """Return every process that is no zombie."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # PID (NAME) STATE PARENT GROUP ...; the name may hold anything, ")" too.
            state, parent, group = path.read_text(errors="replace").rpartition(")")[2].split()[:3]
            if state != "Z":
                found.append(_Process(int(path.parent.name), int(parent), int(group)))
    return found
