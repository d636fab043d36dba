"""One request's coroutine against a backend that is driven by hand: races and exceptions."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Callable

import pytest

from router.answer import Answer
from router.backends.base import BackendCall, PrefillDone
from router.dispatch import Dispatcher
from router.endings import AbandonedError, RejectedError
from router.errors import ClosedEarly, TimedOut
from router.telemetry.metrics import RouterMetrics
from router.telemetry.records import Record, RecordStore
from router.upstream import UpstreamResponse
from router.usage import TokenCounts
from router.wire import Headers
from splitserve import messages as m
from splitserve.scheduling import Scheduler

EVENTS = [(b"content-type", b"text/event-stream")]
TOKEN = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
CALL = BackendCall(b"/v1/chat/completions", b"{}")


class HandResponse:
    """An answer whose pieces a test feeds; None ends it, an exception breaks it."""

    def __init__(self, status: int = 200, headers: Headers = EVENTS) -> None:
        self.status = status
        self.headers = headers
        self.pieces: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        self.closed = False

    def feed(self, *pieces: bytes | Exception | None) -> None:
        for piece in pieces:
            self.pieces.put_nowait(piece)

    @property
    def at_end(self) -> bool:
        return False

    def __aiter__(self) -> HandResponse:
        return self

    async def __anext__(self) -> bytes:
        piece = await self.pieces.get()
        if piece is None:
            raise StopAsyncIteration
        if isinstance(piece, Exception):
            raise piece
        return piece

    async def read(self, limit_bytes: int) -> bytes:
        return b"".join([piece async for piece in self])

    def close(self) -> None:
        self.closed = True

    def on_close(self, callback: Callable[[], None]) -> None:
        raise AssertionError("nobody asks for it here")

    async def __aenter__(self) -> HandResponse:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()


class HandBackend:
    """A worker whose calls a test answers."""

    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id
        self.responses: list[HandResponse] = []
        self.prefill_news: list[m.Handoff | PrefillDone | Exception] = []
        self.prefills_open = 0
        self.released: list[bool] = []

    async def probe(self) -> m.WorkerSnapshot:
        raise AssertionError

    async def load(self, known: m.WorkerSnapshot) -> m.WorkerSnapshot:
        raise AssertionError

    async def prefill(self, call: BackendCall) -> AsyncGenerator[m.Handoff | PrefillDone, None]:
        self.prefills_open += 1
        try:
            for news in self.prefill_news:
                if isinstance(news, Exception):
                    raise news
                yield news
            await asyncio.Event().wait()
        finally:
            self.prefills_open -= 1

    async def decode(self, call: BackendCall, handoff: m.Handoff | None) -> UpstreamResponse:
        response = HandResponse()
        self.responses.append(response)
        return response

    async def release(self, handoff: m.Handoff, *, consumed: bool) -> None:
        self.released.append(consumed)

    def recomputed(self, handoff: m.Handoff, counts: TokenCounts) -> int | None:
        return 0

    def failure_of(self, status: int, body: bytes) -> m.Failure | None:
        return m.Failure.REFUSED


class HandOutput:
    """A client whose connection fails when told to."""

    def __init__(self) -> None:
        self.starts = 0
        self.body = b""
        self.finished = False
        self.fail_at = ""
        self.on_write: Callable[[], None] = lambda: None

    async def start(self, status: int, headers: Headers) -> None:
        self.starts += 1
        if self.fail_at == "start":
            raise OSError("the client is gone")

    async def write(self, piece: bytes) -> None:
        if self.fail_at == "write":
            raise TimeoutError("not the one that is waited for")
        self.body += piece
        self.on_write()

    async def finish(self) -> None:
        self.finished = True


class Stage:
    """A dispatcher with workers driven by hand."""

    def __init__(self, *workers: tuple[str, m.Role]) -> None:
        self.scheduler = Scheduler()
        ticks = itertools.count(1)
        self.dispatcher = Dispatcher(
            self.scheduler, lambda: float(next(ticks)), RecordStore(), RouterMetrics()
        )
        self.workers = {name: HandBackend(name) for name, _ in workers}
        for name, role in workers:
            self.dispatcher.backends[name] = self.workers[name]
            snapshot = m.WorkerSnapshot(name, role, "hand", ("m",), "hand", "k", max_running=1)
            self.dispatcher.tell(m.WorkerReported(snapshot))
        self.output = HandOutput()
        self._numbers = itertools.count(1)

    def ask(self, *, stream: bool = True) -> tuple[Answer, asyncio.Task[None]]:
        request = m.GenerateRequest(f"r{next(self._numbers)}", "m", 10)
        self.record = Record(request, 0.0, 0.0)
        answer = Answer(self.dispatcher, CALL, self.record, stream=stream)
        return answer, asyncio.create_task(answer.run(self.output))

    def lose(self, name: str) -> None:
        """What the registry does, in its order."""
        self.dispatcher.tell(m.WorkerLost(name, "gone"))
        self.dispatcher.backends.pop(name)

    def assert_clean(self) -> None:
        assert self.scheduler.live == 0
        assert self.dispatcher.live == 0
        for account in self.scheduler.ledger.workers.values():
            assert account.bookings == {}
        for worker in self.workers.values():
            assert all(response.closed for response in worker.responses)
            assert worker.prefills_open == 0


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


HANDOFF = m.Handoff("h", "p", "hand", "x")


@pytest.fixture
async def split() -> AsyncIterator[Stage]:
    stage = Stage(("p", m.Role.PREFILL), ("d", m.Role.DECODE))
    yield stage
    await turns()
    stage.assert_clean()
    await stage.dispatcher.shutdown()


@pytest.fixture
async def whole() -> AsyncIterator[Stage]:
    stage = Stage(("a", m.Role.AGGREGATED))
    yield stage
    await turns()
    stage.assert_clean()
    await stage.dispatcher.shutdown()


async def test_decode_that_is_taken_back_in_the_same_turn_is_not_begun(split: Stage) -> None:
    split.workers["p"].prefill_news = [HANDOFF, ClosedEarly("u", 0, "reset")]
    _, task = split.ask()
    await turns()
    # Attempt 1 never reached the decode worker; attempt 2 runs whole on it.
    assert len(split.workers["d"].responses) == 1
    assert split.record.choice.chosen is not None
    assert split.record.choice.chosen.plan is m.PlanKind.AGGREGATED
    split.workers["d"].responses[0].feed(TOKEN, None)
    await task
    assert split.record.finish == "done"
    assert split.workers["p"].released == [False]


async def test_prefill_bug_is_a_failure_and_not_silence(split: Stage) -> None:
    split.workers["p"].prefill_news = [ZeroDivisionError("a bug")]
    _, task = split.ask()
    await turns()
    split.workers["d"].responses[0].feed(TOKEN, None)
    await task
    assert "ZeroDivisionError" in split.record.failures[0]


async def test_worker_lost_in_the_moment_of_the_end(whole: Stage) -> None:
    _, task = whole.ask()
    await turns()
    response = whole.workers["a"].responses[0]
    response.feed(TOKEN)
    await turns()
    response.feed(None)  # wakes the request ...
    whole.lose("a")  # ... but the scheduler hears of the loss first
    await asyncio.wait([task], timeout=1)
    assert task.done()
    assert task.exception() is None or isinstance(task.exception(), RejectedError)


async def test_plain_answer_ends_in_the_moment_its_worker_is_lost() -> None:
    stage = Stage(("a", m.Role.AGGREGATED), ("b", m.Role.AGGREGATED))
    _, task = stage.ask(stream=False)
    await turns()
    response = stage.workers["a"].responses[0]
    response.feed(b"{}", None)
    stage.lose("a")
    await asyncio.wait([task], timeout=1)
    if not task.done():  # it moved: the other worker answers
        stage.workers["b"].responses[0].feed(b"{}", None)
    await asyncio.wait([task], timeout=1)
    assert stage.output.starts == 1
    assert stage.output.body == b"{}"
    stage.assert_clean()
    await stage.dispatcher.shutdown()


async def test_worker_lost_with_nobody_to_move_to_waits_for_one() -> None:
    stage = Stage(("a", m.Role.AGGREGATED), ("b", m.Role.AGGREGATED))
    _, busy = stage.ask()
    _, task = stage.ask()
    await turns()
    stage.lose("a")  # "b" is full: the request of "a" is queued again, and its leg is let go of
    assert stage.scheduler.queued == 1
    await turns()
    stage.workers["b"].responses[0].feed(TOKEN, None)
    await asyncio.wait([busy], timeout=1)
    await turns()
    stage.workers["b"].responses[1].feed(TOKEN, None)
    await asyncio.wait([task], timeout=1)
    stage.assert_clean()
    assert stage.scheduler.queued == 0
    await stage.dispatcher.shutdown()


@pytest.mark.parametrize("stream", [True, False])
async def test_bytes_are_out_and_the_worker_is_lost_is_the_end(stream: bool) -> None:
    stage = Stage(("a", m.Role.AGGREGATED), ("b", m.Role.AGGREGATED))
    _, task = stage.ask(stream=stream)
    await turns()
    stage.workers["a"].responses[0].feed(b": ping\n\n")  # bytes, but no token
    await turns()
    assert stage.output.starts == 1
    stage.lose("a")
    with pytest.raises(RejectedError) as caught:
        await task
    assert caught.value.reject.refusal is m.Refusal.BROKEN
    assert caught.value.begun
    assert stage.output.starts == 1
    assert stage.workers["b"].responses == []
    stage.assert_clean()
    await stage.dispatcher.shutdown()


async def test_plain_answer_that_breaks_is_not_begun_again(whole: Stage) -> None:
    _, task = whole.ask(stream=False)
    await turns()
    whole.workers["a"].responses[0].feed(b"{", ClosedEarly("u", 1, "reset"))
    with pytest.raises(RejectedError) as caught:
        await task
    assert caught.value.reject.refusal is m.Refusal.BROKEN
    assert whole.output.starts == 1
    assert whole.record.finish == "broken"


@pytest.mark.parametrize("fail_at,kind", [("start", OSError), ("write", TimeoutError)])
async def test_client_side_that_raises_ends_the_request(
    whole: Stage, fail_at: str, kind: type[Exception]
) -> None:
    whole.output.fail_at = fail_at
    _, task = whole.ask()
    await turns()
    whole.workers["a"].responses[0].feed(TOKEN)
    with pytest.raises(kind):
        await task
    assert whole.record.finish == "cancelled"


async def test_left_before_it_began(whole: Stage) -> None:
    answer, task = whole.ask()
    answer.abandon()
    with pytest.raises(AbandonedError):
        await task
    assert whole.workers["a"].responses == []


@pytest.mark.parametrize("when", ["as it ends", "as a byte is written"])
async def test_left_in_the_moment_of_the_end(whole: Stage, when: str) -> None:
    answer, task = whole.ask()
    await turns()
    if when == "as a byte is written":
        whole.output.on_write = answer.abandon
    whole.workers["a"].responses[0].feed(TOKEN, TOKEN, None)
    if when == "as it ends":
        answer.abandon()
    await asyncio.wait([task], timeout=1)
    # Whichever came first; the fixture sees that nothing is left.
    assert task.exception() is None or isinstance(task.exception(), AbandonedError)
    assert whole.record.finish == ("done" if task.exception() is None else "cancelled")


async def test_cancelled_from_outside(split: Stage) -> None:
    split.workers["p"].prefill_news = [HANDOFF]
    _, task = split.ask()
    await turns()
    assert split.workers["p"].prefills_open == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await turns()
    assert split.workers["p"].released == [False]


async def test_last_attempt_that_times_out_is_known_as_such(whole: Stage) -> None:
    _, task = whole.ask()
    for number in range(3):
        await turns()
        whole.workers["a"].responses[number].feed(TimedOut("u", "first_byte", 1))
    with pytest.raises(RejectedError) as caught:
        await task
    assert caught.value.timed_out
    assert len(whole.record.failures) == 3
