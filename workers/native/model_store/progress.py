"""What long work shows: a line per step, and a bar on a terminal. Never on standard output."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Advance = Callable[[int, int], None]
"""Called with (done, total)."""


class Reporter(Protocol):
    """Where the model store tells what it does."""

    @property
    def interactive(self) -> bool:
        """Whether a person watches; child processes may then write to stderr too."""

    def say(self, message: str) -> None:
        """Show one line."""

    def bar(self, label: str) -> AbstractContextManager[Advance]:
        """A context whose value moves the bar."""


class ConsoleReporter:
    """Lines and bars on standard error; bars only on a terminal."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)

    @property
    def interactive(self) -> bool:
        """See Reporter."""
        return self._console.is_terminal

    def say(self, message: str) -> None:
        """See Reporter."""
        self._console.print(message, markup=False, soft_wrap=True)

    @contextmanager
    def bar(self, label: str) -> Iterator[Advance]:
        """See Reporter."""
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(
            *columns,
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
            disable=not self.interactive,
        ) as progress:
            task = progress.add_task(label, total=None)
            yield lambda done, total: progress.update(task, completed=done, total=total)


class LogReporter:
    """Lines to the log, no bars: for workers and tests."""

    def __init__(self, logger: logging.Logger | None = None) -> None:
        self._logger = logger or logging.getLogger(__name__)

    @property
    def interactive(self) -> bool:
        """See Reporter."""
        return False

    def say(self, message: str) -> None:
        """See Reporter."""
        self._logger.info("%s", message)

    @contextmanager
    def bar(self, label: str) -> Iterator[Advance]:
        """See Reporter."""
        self._logger.debug("%s", label)
        yield lambda done, total: None
