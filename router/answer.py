"""One request from submission to its last byte: runs the legs ordered, relays the bytes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import NoReturn, TypeVar

from router.backends.base import Backend, BackendCall, quoted_error
from router.dispatch import Dispatcher, Inbox
from router.endings import AbandonedError, EngineAnswer, Output, RejectedError
from router.errors import UpstreamError
from router.event_stream import EventCutter, bears_token, is_event_stream
from router.pair_watch import PairWatch
from router.prefill_leg import LegFailure, failure_of, run_prefill
from router.telemetry.records import Record
from router.upstream import UpstreamResponse
from router.usage import TokenCounts, UsageMeter
from router.wire import Headers
from splitserve import messages as m

_ERROR_LIMIT_BYTES = 1 << 20
_SUSPICIOUS = frozenset((m.Failure.UNREACHABLE, m.Failure.TIMEOUT, m.Failure.BROKEN))
T = TypeVar("T")


class InterruptedByCommand(Exception):
    """A command came that ends the running leg."""


class Answer:
    """Carries out one request's commands. `run` is the request's own coroutine."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        call: BackendCall,
        record: Record,
        *,
        stream: bool,
        watch: PairWatch | None = None,
    ) -> None:
        self._dispatcher = dispatcher
        self._watch = watch
        self._call = call
        self._record = record
        self._stream = stream
        self._prefill: asyncio.Task[None] | None = None
        self._refused: EngineAnswer | None = None
        self._last_failure: m.Failure | None = None
        self._begun = False
        self._abandoned = False
        self._wake: Callable[[], None] | None = None

    def abandon(self) -> None:
        """The client has left: `run` stops at once."""
        self._abandoned = True
        self._interrupt()

    async def run(self, output: Output) -> None:
        """Answer into `output`. Raises RejectedError or AbandonedError; always tidies up."""
        dispatcher, record = self._dispatcher, self._record
        inbox = dispatcher.open(record)
        inbox.on_interrupt = self._interrupt
        try:
            while not await self._obey(await self._next_command(inbox), inbox, output):
                pass
        finally:
            self._end_prefill()
            record.finish = record.finish or "cancelled"
            dispatcher.close(record)

    async def _obey(self, command: m.Command, inbox: Inbox, output: Output) -> bool:
        """Carry one command out; True when the answer is complete."""
        match command:
            case m.StartAggregated(_, attempt, worker_id, choice):
                self._released(attempt, choice)
                return await self._lead(inbox, output, worker_id, attempt, None)
            case m.StartPrefill(_, attempt, worker_id, decode_worker_id, choice):
                self._released(attempt, choice)
                self._prefill = self._start_prefill(worker_id, attempt, decode_worker_id)
            case m.StartDecode(_, attempt, worker_id, handoff):
                return await self._lead(inbox, output, worker_id, attempt, handoff)
            case m.Cancel():
                self._end_prefill()
            case m.Reject():
                self._rejected(command)
            case _:
                raise AssertionError(f"{command!r} is not for a request")
        return False

    def _released(self, attempt: int, choice: m.Choice) -> None:
        record = self._record
        last = f"attempt {attempt - 1}, "
        if attempt > 1 and not any(line.startswith(last) for line in record.failures):
            record.failures.append(f"{last}ended because a worker was lost")
        if self._begun:  # only a lost worker leads here: the scheduler knew of no byte yet
            request_id = record.request.request_id
            self._rejected(m.Reject(request_id, m.Refusal.BROKEN, "the worker was lost"))
        self._end_prefill()
        self._refused = None
        record.keep(choice)
        record.attempts = attempt
        record.released_s = self._dispatcher.clock()

    def _rejected(self, reject: m.Reject) -> NoReturn:
        record = self._record
        if self._begun:
            reject = replace(reject, refusal=m.Refusal.BROKEN)
        if record.choice.chosen is None:
            record.keep(reject.choice)
        record.finish = reject.refusal.value
        timed_out = reject.refusal is m.Refusal.FAILED and self._last_failure is m.Failure.TIMEOUT
        raise RejectedError(reject, self._refused, begun=self._begun, timed_out=timed_out)

    def _start_prefill(
        self, worker_id: str, attempt: int, decode_worker_id: str
    ) -> asyncio.Task[None]:
        def failed(why: LegFailure) -> None:
            if why.answer is not None:
                self._refused = why.answer
            leg = m.Leg.PREFILL
            self._failed(leg, worker_id, attempt, why.failure, why.detail, final=why.final)

        decode = self._dispatcher.scheduler.ledger.workers.get(decode_worker_id)
        connector = decode.snapshot.connector if decode is not None else ""
        call = replace(self._call, decode_connector=connector)
        leg = run_prefill(self._dispatcher, call, self._record, worker_id, attempt, failed=failed)
        return self._dispatcher.spawn(leg)

    def _end_prefill(self) -> None:
        if self._prefill is not None:
            self._prefill.cancel()

    # --- the leg that answers -------------------------------------------------------------------

    async def _lead(
        self, inbox: Inbox, output: Output, worker_id: str, attempt: int, handoff: m.Handoff | None
    ) -> bool:
        if inbox.ready:  # what came meanwhile ends this attempt before it began
            return False
        leg = m.Leg.AGGREGATED if handoff is None else m.Leg.DECODE
        backend = self._dispatcher.backends.get(worker_id)
        if backend is None:
            self._failed(leg, worker_id, attempt, m.Failure.WORKER_LOST, "it was removed")
            return False
        try:
            return await self._interruptible(
                partial(self._relay, backend, output, attempt, handoff)
            )
        except InterruptedByCommand:
            return False
        except UpstreamError as error:
            failure = m.Failure.BROKEN if self._begun else failure_of(error)
            self._failed(leg, worker_id, attempt, failure, str(error))
            return False

    async def _relay(
        self, backend: Backend, output: Output, attempt: int, handoff: m.Handoff | None
    ) -> bool:
        async with await backend.decode(self._call, handoff) as response:
            if response.status >= 400:
                await self._engine_error(backend, response, attempt, handoff)
                return False
            piece = await anext(response, b"")
            if self._stream and not piece:
                leg = m.Leg.AGGREGATED if handoff is None else m.Leg.DECODE
                detail = f"HTTP {response.status} and no byte of a stream"
                self._failed(leg, backend.worker_id, attempt, m.Failure.UNREACHABLE, detail)
                return False
            self._begun = True
            await output.start(response.status, response.headers)
            meter = self._meter(backend, handoff)
            await self._pass_on(piece, response, output, attempt, meter)
        self._note_handoff(response.headers)
        counts = meter.counts()
        recomputed = None if handoff is None else backend.recomputed(handoff, counts)
        self._record.recomputed_tokens = recomputed
        self._finished(attempt, counts)
        if handoff is not None and self._watch is not None:
            self._watch.answered(self._call, handoff, backend.worker_id, meter, recomputed)
        await output.finish()
        return True

    def _meter(self, backend: Backend, handoff: m.Handoff | None) -> UsageMeter:
        if handoff is None or self._watch is None:
            return UsageMeter(stream=self._stream)
        return self._watch.meter(self._call, handoff, backend.worker_id, stream=self._stream)

    async def _pass_on(
        self,
        piece: bytes,
        response: UpstreamResponse,
        output: Output,
        attempt: int,
        meter: UsageMeter,
    ) -> None:
        """Relay the body, of which `piece` is the beginning; `meter` sees all of it."""
        cutter = EventCutter() if is_event_stream(response.headers) else None
        waiting, first = self._stream, 0
        request_id = self._record.request.request_id
        while piece:
            whole = piece if cutter is None else cutter.whole(piece)
            if waiting and (cutter is None or bears_token(whole)):
                waiting, first = False, meter.events
                self._first_token(attempt, response.headers)
            if whole:
                meter.see(whole)
                if not waiting and self._stream:
                    self._record.output_tokens = tokens = max(1, meter.events - first)
                    self._dispatcher.advanced(request_id, attempt, tokens)
                await output.write(whole)
            piece = b"" if response.at_end else await anext(response, b"")
        if cutter is not None and (rest := cutter.rest()):
            meter.see(rest)
            await output.write(rest)

    async def _engine_error(
        self, backend: Backend, response: UpstreamResponse, attempt: int, handoff: m.Handoff | None
    ) -> None:
        body = await response.read(_ERROR_LIMIT_BYTES)
        self._refused = EngineAnswer(response.status, response.headers, body)
        failure = backend.failure_of(response.status, body)
        leg = m.Leg.AGGREGATED if handoff is None else m.Leg.DECODE
        self._failed(
            leg,
            backend.worker_id,
            attempt,
            failure or m.Failure.REFUSED,
            f"HTTP {response.status}{quoted_error(body)}",
            final=failure is None,
        )

    def _first_token(self, attempt: int, headers: Headers) -> None:
        record = self._record
        record.first_token_s = self._dispatcher.clock()
        self._note_handoff(headers)
        self._dispatcher.tell(
            m.FirstToken(
                record.request.request_id, attempt, record.transfer_bytes, record.transfer_s or 0.0
            )
        )

    def _note_handoff(self, headers: Headers) -> None:
        record = self._record
        for name, value in headers:
            if name == b"x-splitserve-transfer-ms":
                record.transfer_s = _figure(value) / 1e3
            elif name == b"x-splitserve-transfer-bytes":
                record.transfer_bytes = int(_figure(value))

    def _finished(self, attempt: int, counts: TokenCounts) -> None:
        record = self._record
        record.last_token_s = self._dispatcher.clock()
        record.prompt_tokens = counts.prompt_tokens
        record.cached_tokens = counts.cached_tokens
        record.output_tokens = counts.output_tokens
        record.finish = "done"
        self._dispatcher.tell(
            m.DecodeFinished(
                record.request.request_id,
                attempt,
                counts.prompt_tokens or 0,
                counts.cached_tokens or 0,
                counts.output_tokens,
            )
        )

    # --- failures and interruptions -------------------------------------------------------------

    def _failed(
        self,
        leg: m.Leg,
        worker_id: str,
        attempt: int,
        failure: m.Failure,
        detail: str,
        *,
        final: bool = False,
    ) -> None:
        """Tell of it. Once bytes are out no other attempt can mend anything."""
        record = self._record
        record.failures.append(f"attempt {attempt}, {leg} on {worker_id}: {detail}")
        self._last_failure = failure
        if failure in _SUSPICIOUS:
            self._dispatcher.suspect(worker_id)
        final = final or (self._begun and leg is not m.Leg.PREFILL)
        self._dispatcher.tell(
            m.LegFailed(
                record.request.request_id, attempt, leg, worker_id, failure, detail, final=final
            )
        )

    async def _next_command(self, inbox: Inbox) -> m.Command:
        if inbox.ready:
            return inbox.pop()
        return await self._interruptible(inbox.get)

    async def _interruptible(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work` until it ends, the client leaves, or `_wake` is called.

        Raises AbandonedError or InterruptedByCommand; `work` is cancelled then.
        """
        now_s = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(None) as scope:
                self._wake = lambda: scope.reschedule(now_s())
                if self._abandoned:
                    raise AbandonedError
                return await work()
        except TimeoutError:
            if not scope.expired():
                raise
            if self._abandoned:
                raise AbandonedError from None
            raise InterruptedByCommand from None
        finally:
            self._wake = None

    def _interrupt(self) -> None:
        wake, self._wake = self._wake, None
        if wake is not None:
            wake()


def _figure(value: bytes) -> float:
    """Read a figure of a response header; 0 for what is none."""
    try:
        number = float(value)
    except ValueError:
        return 0.0
    return number if math.isfinite(number) and number >= 0 else 0.0
