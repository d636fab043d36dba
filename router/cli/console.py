"""Where commands write: rich on a terminal, plain text elsewhere."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_PLAIN_COLUMNS = 1000  # a log file or a pipe has no width; do not fold lines into it


def stdout_console() -> Console:
    """Return a console on standard output."""
    return _console(sys.stdout)


def stderr_console() -> Console:
    """Return a console on standard error, for progress and notes."""
    return _console(sys.stderr)


def _console(stream: TextIO) -> Console:
    from rich.console import Console

    width = None if stream.isatty() else _PLAIN_COLUMNS
    return Console(file=stream, width=width, highlight=False, soft_wrap=True, emoji=False)


def counted(number: int, noun: str) -> str:
    """Write a number with its noun: 1 worker, 2 workers."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def table(
    console: Console, *headings: str, title: str | None = None, right: tuple[int, ...] = ()
) -> Table:
    """Return an empty table for `console`; `right` are the columns of figures."""
    from rich import box
    from rich.table import Table

    frame = box.SIMPLE_HEAD if console.is_terminal else None
    made = Table(title=title, title_justify="left", box=frame, pad_edge=False, show_edge=False)
    for index, heading in enumerate(headings):
        made.add_column(heading, justify="right" if index in right else "left", overflow="fold")
    return made
