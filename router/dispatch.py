"""The Dispatcher: feeds Events to the Scheduler and carries out its Commands.

The only caller of `Scheduler.step`, on one event loop, without awaiting in between. A request's
own coroutine runs its decode (or whole) leg and relays the bytes; a prefill leg is a task beside
it. Commands reach a request through its `Ticket`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from router.backends.base import Backend
from router.errors import RouterError
from router.telemetry.metrics import RouterMetrics
from router.telemetry.records import Record, RecordStore
from splitserve import messages as m
from splitserve.scheduling import Scheduler

log = logging.getLogger("splitserve.dispatch")

_LAST_RELEASES_S = 1.0
_PROGRESS_S = 0.05  # how often the scheduler hears how far streams have come


class EventSink(Protocol):
    """Records what the scheduler was told, for replay."""

    def write(self, now_s: float, event: m.Event) -> None: ...


class Inbox:
    """Commands for one request, in order, and a way to wait for the next."""

    __slots__ = ("_commands", "_waiter", "on_interrupt")

    def __init__(self) -> None:
        self._commands: deque[m.Command] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self.on_interrupt: Callable[[], None] | None = None

    def put(self, command: m.Command) -> None:
        """Add a command. While a leg answers, any command means that its attempt is over."""
        self._commands.append(command)
        if self._waiter is not None:
            if not self._waiter.done():
                self._waiter.set_result(None)
        elif self.on_interrupt is not None:
            self.on_interrupt()

    @property
    def ready(self) -> bool:
        """True when a command is there."""
        return bool(self._commands)

    def pop(self) -> m.Command:
        """Return the next command, which is there."""
        return self._commands.popleft()

    async def get(self) -> m.Command:
        """Wait for the next command."""
        while not self._commands:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._commands.popleft()


class Dispatcher:
    """Owns the scheduler and the tickets of live requests."""

    def __init__(
        self,
        scheduler: Scheduler,
        clock: Callable[[], float],
        records: RecordStore,
        metrics: RouterMetrics,
        event_log: EventSink | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.records = records
        self.metrics = metrics
        self.backends: dict[str, Backend] = {}
        self.clock = clock
        self.on_suspicion: Callable[[str], None] | None = None
        self.on_recompute: Callable[[str, int], None] | None = None
        self._event_log = event_log
        self._inboxes: dict[str, Inbox] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self.on_event: Callable[[m.Event, float], None] | None = None
        self.after_step: Callable[[], None] | None = None
        self._progress: dict[str, tuple[str, int, int, float]] = {}

    @property
    def live(self) -> int:
        """Requests that somebody waits for."""
        return len(self._inboxes)

    def open(self, record: Record) -> Inbox:
        """Register a request's inbox and tell the scheduler of its arrival."""
        inbox = Inbox()
        self._inboxes[record.request.request_id] = inbox
        self.records.add(record)
        self.tell(m.RequestArrived(record.request))
        return inbox

    def close(self, record: Record) -> None:
        """The request's coroutine is over, and with it the request.

        The scheduler may hold it even after DecodeFinished: a worker that was declared lost in the
        same turn of the loop had made that one stale, and another attempt was on its way.
        """
        request_id = record.request.request_id
        del self._inboxes[request_id]
        if self.scheduler.holds(request_id):
            self.tell(m.RequestCancelled(request_id))
        self.metrics.saw_end(record)

    def advanced(self, request_id: str, attempt: int, tokens: int) -> None:
        """A stream has come so far; told to the scheduler together with others, soon."""
        if not self._progress:
            asyncio.get_running_loop().call_later(_PROGRESS_S, self._tell_progress)
        self._progress[request_id] = (request_id, attempt, tokens, self.clock())

    def _tell_progress(self) -> None:
        progress, self._progress = tuple(self._progress.values()), {}
        if progress:
            self.tell(m.StreamsAdvanced(progress))

    def tell(self, event: m.Event) -> None:
        """Step the scheduler and hand out what it commands."""
        now_s = self.clock()
        if self._event_log is not None:
            self._record(self._event_log, now_s, event)
        if self.on_event is not None:
            self.on_event(event, now_s)
        for command in self.scheduler.step(event, now_s):
            self._obey(command)
        if self.after_step is not None:
            self.after_step()

    def suspect(self, worker_id: str) -> None:
        """A call to this worker failed as if it were dead: whoever watches it should look now."""
        if self.on_suspicion is not None:
            self.on_suspicion(worker_id)

    def recomputed(self, worker_id: str, tokens: int) -> None:
        """A decode worker's counters show that it computed handed-over prompt tokens again."""
        self.metrics.saw_recompute(tokens)
        if self.on_recompute is not None:
            self.on_recompute(worker_id, tokens)

    def _record(self, event_log: EventSink, now_s: float, event: m.Event) -> None:
        try:
            event_log.write(now_s, event)
        except OSError as error:  # requests matter more; a log with a gap would not replay
            log.error("the event log ends here: %s; free the disk and restart the router", error)
            self._event_log = None

    def _obey(self, command: m.Command) -> None:
        match command:
            case m.ReleaseKV(handoff, consumed):
                self._release(handoff, consumed)
            case m.WakeAt(at_s):
                self._wake_at(at_s)
            case m.SetRole():
                log.info("role of %s is now %s", command.worker_id, command.role)
            case _:
                inbox = self._inboxes.get(command.request_id)
                if inbox is not None:
                    inbox.put(command)

    def _wake_at(self, at_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        delay_s = max(0.0, at_s - self.clock())
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(delay_s, self.tell, m.TimerFired())

    def _release(self, handoff: m.Handoff, consumed: bool) -> None:
        backend = self.backends.get(handoff.worker_id)
        if backend is not None:
            self.spawn(self._try_release(backend, handoff, consumed))

    @staticmethod
    async def _try_release(backend: Backend, handoff: m.Handoff, consumed: bool) -> None:
        try:
            await backend.release(handoff, consumed=consumed)
        except RouterError as error:  # the lease on the worker ends it then
            log.warning("hand-off %s was not released: %s", handoff.handoff_id, error)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something beside; it is kept alive and cancelled at shutdown."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def shutdown(self) -> None:
        """End what runs beside requests; hand-offs get a moment to be released."""
        if self._timer is not None:
            self._timer.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_LAST_RELEASES_S)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._event_log = None
