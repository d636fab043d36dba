"""Writes the scheduler's events to a file, one line each, for replay."""

from __future__ import annotations

from pathlib import Path

from splitserve import eventlog
from splitserve.messages import Event


class EventLogFile:
    """Appends lines to `path`, which is begun anew: a log replays from an empty scheduler."""

    def __init__(self, path: Path) -> None:
        """Raises OSError when the file cannot be written."""
        self._file = path.open("w", encoding="utf-8", buffering=1 << 16)

    def write(self, now_s: float, event: Event) -> None:
        """Append one event."""
        self._file.write(eventlog.encode(now_s, event) + "\n")

    def close(self) -> None:
        """Write out what is buffered."""
        self._file.close()
