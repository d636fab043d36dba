"""The leg that prefills for another worker: runs beside the request's own coroutine."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

from router.backends.base import Backend, BackendCall, EngineRefused, PrefillDone, quoted_error
from router.dispatch import Dispatcher
from router.endings import EngineAnswer
from router.errors import HandoffFailed, LimitReached, TimedOut, UpstreamError
from router.telemetry.records import Record
from splitserve import messages as m

log = logging.getLogger("splitserve.answer")


@dataclass(frozen=True, slots=True)
class LegFailure:
    """Why a leg ended without its result. `answer`: what the engine said, where it said it."""

    failure: m.Failure
    detail: str
    final: bool = False
    answer: EngineAnswer | None = None


def failure_of(error: UpstreamError) -> m.Failure:
    """Say what an error means that came before the first byte of an answer."""
    match error:
        case TimedOut():
            return m.Failure.TIMEOUT
        case LimitReached():
            return m.Failure.REFUSED
        case HandoffFailed():
            return m.Failure.HANDOFF
        case _:
            return m.Failure.UNREACHABLE


async def run_prefill(
    dispatcher: Dispatcher,
    call: BackendCall,
    record: Record,
    worker_id: str,
    attempt: int,
    *,
    failed: Callable[[LegFailure], None],
) -> None:
    """Prefill `call` on a worker and tell the scheduler how it goes; never raises."""
    backend = dispatcher.backends.get(worker_id)
    if backend is None:
        failed(LegFailure(m.Failure.WORKER_LOST, "it was removed"))
        return
    try:
        await _prefill(dispatcher, backend, call, record, attempt)
    except EngineRefused as error:
        failure = backend.failure_of(error.status, error.body)
        failed(
            LegFailure(
                failure or m.Failure.REFUSED,
                f"{error}{quoted_error(error.body)}",
                failure is None,
                EngineAnswer(error.status, error.headers, error.body),
            )
        )
    except UpstreamError as error:
        failed(LegFailure(failure_of(error), str(error)))
    except Exception as error:  # task boundary: nobody awaits it, so it must not end unheard
        log.exception("prefill on %s", worker_id)
        failed(LegFailure(m.Failure.UNREACHABLE, repr(error)))


async def _prefill(
    dispatcher: Dispatcher, backend: Backend, call: BackendCall, record: Record, attempt: int
) -> None:
    request_id = record.request.request_id
    async with contextlib.aclosing(backend.prefill(call)) as progress:
        async for news in progress:
            if isinstance(news, PrefillDone):
                record.prefill_s = news.prefill_s
                dispatcher.tell(
                    m.PrefillFinished(
                        request_id,
                        attempt,
                        news.prompt_tokens,
                        news.cached_tokens,
                        news.prefill_s,
                    )
                )
            else:
                dispatcher.tell(m.HandoffReady(request_id, attempt, news))
