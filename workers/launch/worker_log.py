"""A worker's log file: bounded, and the same one over all its restarts."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import BinaryIO

_MOST_BYTES = 16 << 20
_TAIL_BYTES = 8192
_LINE_CHARACTERS = 300


class WorkerLog:
    """Engines append to it; `trim` keeps it and the part before it (`.1`) below `most_bytes` each.

    The engine holds the file open, so its beginning is copied and cut off under it. What it writes
    between the two is lost, some lines at most.
    """

    def __init__(self, path: Path, most_bytes: int = _MOST_BYTES) -> None:
        self.path = path
        self._most_bytes = most_bytes
        self._run_begins_bytes = 0

    def begin_run(self) -> BinaryIO:
        """Open it for another run, whose lines come after those of the run before."""
        log = self.path.open("ab")
        self._run_begins_bytes = log.tell()
        return log

    def trim(self) -> None:
        """Move what it holds to `.1` when it has grown too long."""
        if self.path.exists() and self.path.stat().st_size > self._most_bytes:
            shutil.copyfile(self.path, self.path.with_name(self.path.name + ".1"))
            os.truncate(self.path, 0)
            self._run_begins_bytes = 0

    def tail(self) -> str:
        """Return the end of what the run that began last has written."""
        with self.path.open("rb") as log:
            end_bytes = log.seek(0, os.SEEK_END)
            log.seek(max(self._run_begins_bytes, end_bytes - _TAIL_BYTES))
            return log.read().decode(errors="replace")

    def last_lines(self, count: int) -> str:
        """Return the last lines of that run that are not empty, in one line."""
        lines = [" ".join(line.split())[:_LINE_CHARACTERS] for line in self.tail().splitlines()]
        return " | ".join([line for line in lines if line][-count:])
