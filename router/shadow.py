"""The shadow check: now and then, is what a pair answers what its decode worker says alone?

KV that was moved wrongly does not fail: the answer is fluent and wrong. So a few greedy answers
of every pair are computed again whole, in the background and only while the decode worker has
nothing else to do, and the texts are compared. Texts that differ are a proof only when the worker
says the same alone twice. Prompts and answers stay in memory until then, and are never logged.
"""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass, replace
from enum import StrEnum

from router.backends.base import Backend, BackendCall, quoted_error
from router.dispatch import Dispatcher
from router.errors import RouterError
from router.greedy import is_greedy
from router.sections import ShadowCheck
from router.spoken import spoken
from router.usage import UsageMeter
from splitserve import messages as m

log = logging.getLogger("splitserve.shadow")

_ANSWER_LIMIT_BYTES = 256 * 1024
_AGAIN_S = 60.0  # until a pair is tried again whose check came to nothing
_PATIENCE_S = 300.0  # for all of a check, waiting included
_TRIES = 3  # answers computed whole and given up for a client's sake
_STRIKES = 3  # differences in a row that convict a pair whose texts may part later on


class Verdict(StrEnum):
    """How a check ended."""

    AGREED = "agreed"
    DIFFERED = "differed"
    UNCLEAR = "unclear"  # alone the worker does not say the same twice either
    FAILED = "failed"  # alone it did not answer
    SKIPPED = "skipped"  # no idle moment


class _NoIdleMoment(Exception):
    """Clients keep the worker busy, or it has left."""


class Transcript(UsageMeter):
    """A meter that also keeps the answer, if it is short."""

    __slots__ = ("_pieces", "stream", "too_long")

    def __init__(self, *, stream: bool) -> None:
        super().__init__(stream=stream)
        self.stream = stream
        self._pieces: list[bytes] = []
        self.too_long = False

    def see(self, piece: bytes) -> None:
        """Take note of a relayed piece."""
        super().see(piece)
        if not self.too_long:
            self._pieces.append(piece)
            self.too_long = self._bytes > _ANSWER_LIMIT_BYTES
        if self.too_long:
            self._pieces.clear()

    def text(self) -> str:
        """Return what was said. Raises ValueError for what is no answer of a model."""
        return spoken(b"".join(self._pieces), stream=self.stream)


@dataclass(frozen=True, slots=True)
class _Check:
    """One answer to be checked. `exact`: both workers must compute the very same text."""

    call: BackendCall
    prefill_worker: str
    backend: Backend
    text: str
    stream: bool
    exact: bool

    @property
    def pair(self) -> tuple[str, str]:
        return self.prefill_worker, self.backend.worker_id


@dataclass(slots=True)
class _Known:
    """What is known of a pair: between which processes, and when it is to be checked next."""

    prefill: Backend
    decode: Backend
    due_s: float
    strikes: int = 0


class ShadowChecker:
    """Chooses answers, compares one at a time, quarantines pairs."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        settings: ShadowCheck,
        draw: random.Random,
    ) -> None:
        self._dispatcher = dispatcher
        self._settings = settings
        self._draw = draw
        self._known: dict[tuple[str, str], _Known] = {}
        self._running: asyncio.Task[None] | None = None

    # --- which answers --------------------------------------------------------------------------

    def transcript(
        self, call: BackendCall, prefill_worker: str, decode_worker: str, *, stream: bool
    ) -> Transcript | None:
        """Return a meter that keeps the answer to `call`, where it is one to check."""
        known = self._of(prefill_worker, decode_worker)
        if known is None:
            return None
        now_s = self._dispatcher.clock()
        due = self._settings.at_join and known.due_s <= now_s
        if not due and (not self._settings.share or self._draw.random() >= self._settings.share):
            return None
        if not is_greedy(call):
            return None
        known.due_s = max(known.due_s, now_s + _AGAIN_S)  # nobody else's answer meanwhile
        return Transcript(stream=stream)

    def _of(self, prefill_worker: str, decode_worker: str) -> _Known | None:
        backends = self._dispatcher.backends
        prefill, decode = backends.get(prefill_worker), backends.get(decode_worker)
        account = self._dispatcher.scheduler.ledger.workers.get(decode_worker)
        if prefill is None or decode is None or account is None or account.snapshot.splits_only:
            return None
        pair = prefill_worker, decode_worker
        known = self._known.get(pair)
        if known is None or known.prefill is not prefill or known.decode is not decode:
            self._known = {key: kept for key, kept in self._known.items() if self._lives(kept)}
            known = self._known[pair] = _Known(prefill, decode, 0.0)
        return known

    def _lives(self, known: _Known) -> bool:
        backends = self._dispatcher.backends
        ends = known.prefill, known.decode
        return all(backends.get(end.worker_id) is end for end in ends)

    def offer(self, transcript: Transcript, call: BackendCall, prefill: str, decode: str) -> None:
        """An answer whose transcript was kept is complete: check it soon."""
        backend = self._dispatcher.backends.get(decode)
        if backend is None or transcript.too_long:
            return
        if self._running is not None:
            self._count(Verdict.SKIPPED)
            return
        try:
            text = transcript.text()
        except ValueError:  # the client has seen it too; there is nothing to compare
            return
        if not text:
            return
        workers = self._dispatcher.scheduler.ledger.workers
        engines = {workers[name].snapshot.engine for name in (prefill, decode) if name in workers}
        exact = self._settings.exact and len(engines) == 1
        check = _Check(call, prefill, backend, text, transcript.stream, exact)
        self._running = asyncio.create_task(self._run(check))
        self._running.add_done_callback(self._ended)

    def _ended(self, _: asyncio.Task[None]) -> None:
        self._running = None

    async def stop(self) -> None:
        """End a check that runs."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])

    # --- one check ------------------------------------------------------------------------------

    async def _run(self, check: _Check) -> None:
        try:
            async with asyncio.timeout(_PATIENCE_S):
                verdict = await self._compare(check)
        except (TimeoutError, _NoIdleMoment):
            verdict = Verdict.SKIPPED
        except (RouterError, ValueError) as error:
            log.warning("the shadow check of %s -> %s failed: %s", *check.pair, error)
            verdict = Verdict.FAILED
        except Exception:  # task boundary: nobody awaits it, so it must not end unheard
            log.exception("the shadow check of %s -> %s", *check.pair)
            verdict = Verdict.FAILED
        self._count(verdict)
        self._conclude(check, verdict)

    async def _compare(self, check: _Check) -> Verdict:
        first = await self._alone(check, 1)
        if _same(check, check.text, first):
            return Verdict.AGREED
        second = await self._alone(check, 2)
        if _same(check, first, second) and not _same(check, check.text, second):
            return Verdict.DIFFERED
        return Verdict.UNCLEAR

    async def _alone(self, check: _Check, number: int) -> str:
        """Return what the decode worker says alone. A client that comes ends it: once more then."""
        changed = asyncio.Event()
        self._dispatcher.after_step = changed.set
        try:
            for again in range(_TRIES):
                while not self._idle(check):
                    await _next(changed)
                asked = asyncio.create_task(_ask(check, f"{number}-{again}"))
                asked.add_done_callback(lambda _: changed.set())
                try:
                    while self._idle(check):
                        if asked.done():
                            return asked.result()
                        await _next(changed)
                finally:
                    asked.cancel()
                    await asyncio.gather(asked, return_exceptions=True)
        finally:
            self._dispatcher.after_step = None
        raise _NoIdleMoment

    def _idle(self, check: _Check) -> bool:
        decode = check.backend.worker_id
        account = self._dispatcher.scheduler.ledger.workers.get(decode)
        if account is None or self._dispatcher.backends.get(decode) is not check.backend:
            raise _NoIdleMoment
        return account.in_flight == 0

    # --- what follows ---------------------------------------------------------------------------

    def _count(self, verdict: Verdict) -> None:
        self._dispatcher.metrics.saw_shadow_check(verdict)

    def _conclude(self, check: _Check, verdict: Verdict) -> None:
        known = self._known.get(check.pair)
        if known is None or not self._lives(known):
            return
        match verdict:
            case Verdict.AGREED | Verdict.UNCLEAR:
                known.due_s, known.strikes = float("inf"), 0
            case Verdict.DIFFERED:
                known.due_s = 0.0  # to be checked when it serves again
                known.strikes += 1
                if known.strikes >= (1 if check.exact else _STRIKES):
                    known.strikes = 0
                    self._quarantine(check)
            case Verdict.FAILED | Verdict.SKIPPED:
                pass  # due again after a while

    def _quarantine(self, check: _Check) -> None:
        prefill, decode = check.pair
        reason = f"its greedy answer was not what {decode} says alone"
        mend = "compare the two workers' models, versions and flags"
        if check.exact:
            mend += "; if only their hardware is unlike, set shadow_check.exact to false"
        hold_s = self._settings.quarantine_s
        log.error("%s -> %s: no hand-offs for %g s: %s; %s", *check.pair, hold_s, reason, mend)
        until_s = self._dispatcher.clock() + hold_s
        self._dispatcher.tell(m.PairJudged(prefill, decode, reason, until_s))


async def _next(changed: asyncio.Event) -> None:
    await changed.wait()
    changed.clear()


async def _ask(check: _Check, number: str) -> str:
    """Put the question to the decode worker alone. Raises UpstreamError and ValueError.

    Engines file the KV they were handed under its prompt and would use it again, hence `fresh` and
    a tenant that nobody else has: dialects keep tenants' caches apart.
    """
    name = f"shadow-{number}-{check.call.request_id}"
    headers = [field for field in check.call.headers if field[0] != b"x-request-id"]
    call = replace(
        check.call,
        headers=(*headers, (b"x-request-id", name.encode())),
        request_id=name,
        tenant=name,
        batch=True,
        fresh=True,
    )
    async with await check.backend.decode(call, None) as response:
        body = await response.read(_ANSWER_LIMIT_BYTES)
        if response.status != 200:
            raise ValueError(f"HTTP {response.status}{quoted_error(body)}")
    return spoken(body, stream=check.stream)


def _same(check: _Check, one: str, other: str) -> bool:
    """Compare two answers. Unlike machines part sooner or later, but not at the first word."""
    return one == other if check.exact else one.split()[:1] == other.split()[:1]
