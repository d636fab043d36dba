"""Small duties that must be done although nobody waits for them any more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from router.errors import RouterError

log = logging.getLogger("splitserve.backends")
T = TypeVar("T")


class Background:
    """Keeps tasks alive until they are done. What cannot be done is logged, not raised."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Begin something that is seen to its end, whoever is cancelled meanwhile."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._over)
        return task

    def _over(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()  # taken, so that a task nobody awaits is not reported as lost
        if error is not None and not isinstance(error, RouterError):
            log.error("a duty in the background failed", exc_info=error)

    def try_to(self, what: str, work: Coroutine[Any, Any, object]) -> None:
        """Begin something of which a failure is of no further consequence."""
        self.start(self._try(what, work))

    @staticmethod
    async def _try(what: str, work: Coroutine[Any, Any, object]) -> None:
        try:
            await work
        except RouterError as error:
            log.warning("%s: %s", what, error)
