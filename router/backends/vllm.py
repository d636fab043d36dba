"""vLLM, unmodified: whole requests, and hand-overs through its KV connectors.

Which connector a worker was started with no route tells, so the configuration does (`kv`). Routes
used: `GET /version`, `/v1/models`, `/metrics`, `/health`, and the client's own for both legs. The
prefill leg is the client's request for one token; the decode leg samples every token, so seeds,
log-probabilities and stop words behave as in a whole run.

A prefill worker keeps KV for a lease, of which nothing can be given back early: a claim that no
decode worker read holds its blocks until then, and `vllm:kv_cache_usage_perc` counts them as used.
Only the decode worker renews a lease, once the request has reached it and the two have met. After
the lease it would read whatever is in those blocks by then and answer 200 with a wrong text, so
a late hand-off is refused here, and so is an answer whose first token came after the lease from
two workers that met for the first time, which takes up to half a minute on a busy host.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import replace
from itertools import count
from typing import TypeVar

import msgspec

from router.backends.base import (
    BackendCall,
    EngineRefused,
    PrefillDone,
    Target,
    quoted_error,
)
from router.backends.first_event import opened
from router.backends.vllm_body import own_body, prefill_body, why_not_split
from router.backends.vllm_claim import Claim, PrefillAnswer
from router.backends.vllm_connectors import Connector, ExampleFiles
from router.backends.vllm_filler import (
    Tokens,
    given_ids,
    ids_body,
    require_plain,
    tokenize_body,
    with_filler,
)
from router.backends.vllm_watch import ENGINE, VllmWatch
from router.errors import HandoffExpired, HandoffFailed, Malformed
from router.upstream import Upstream, UpstreamResponse
from router.usage import TokenCounts
from router.wire import Deadlines, Headers
from splitserve.messages import Failure, Handoff, WorkerSnapshot

log = logging.getLogger("splitserve.vllm")

_REPLY_LIMIT_BYTES = 64 << 20  # a prompt's token ids may be in it
_ERROR_LIMIT_BYTES = 1 << 20
_ID_HEADER = b"x-request-id"
_FORM = b"multipart/form-data"
T = TypeVar("T")
_SAYS_PRIORITY = re.compile("(?i)priority")


class VllmBackend:
    """A vLLM server in any role. `clock` gives seconds and never goes back."""

    engine = ENGINE

    def __init__(
        self,
        target: Target,
        upstream: Upstream,
        deadlines: Deadlines,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.worker_id = target.worker_id
        self.origin = target.origin
        self._upstream = upstream
        self._headers = target.options.headers
        self._deadlines = deadlines
        self._clock = clock
        self._watch = VllmWatch(target, upstream)
        self._met: set[str] = set()
        self._numbers = count(1)

    async def probe(self) -> WorkerSnapshot:
        """Ask what it is. Raises ValueError when it is not vLLM, and Unusable."""
        return await self._watch.probe()

    async def load(self, known: WorkerSnapshot) -> WorkerSnapshot:
        """Ask how busy it is. Raises WorkerRestarted when another process answers."""
        return await self._watch.load(known)

    # --- the legs -------------------------------------------------------------------------------

    async def prefill(self, call: BackendCall) -> AsyncGenerator[Handoff | PrefillDone, None]:
        """Prefill with a request for one token. Raises HandoffFailed for what vLLM cannot split."""
        connector = self._watch.connector
        assert connector is not None, f"{self.worker_id} has no way to move KV"
        reason = why_not_split(call.body)
        if reason:
            raise HandoffFailed(
                self.origin.url, f"this request cannot be split ({reason})", "it is answered whole"
            )
        request_id = self._leg_id(call)
        sent_s = self._clock()
        prompt_tokens = None
        if call.decode_connector not in ("", connector.name):
            call, prompt_tokens = await self._lengthened(call, connector, request_id)
        if connector.at_once:
            yield self._handoff(connector, connector.before(request_id, sent_s))
        answer = await self._prefilled(call, connector, request_id)
        done_s = self._clock()
        claim = connector.after(self.origin.url, request_id, answer, done_s)
        claim.prompt_tokens = prompt_tokens
        if not connector.at_once:
            yield self._handoff(connector, claim)
        length = answer.prompt_tokens if prompt_tokens is None else prompt_tokens
        yield PrefillDone(length, answer.cached_tokens, max(done_s - sent_s, 1e-9))

    async def _lengthened(
        self, call: BackendCall, connector: Connector, mark: str
    ) -> tuple[BackendCall, int]:
        """Return a call that prefills for another engine, and the length of its prompt.

        Raises EngineRefused when the engine does not take the prompt, and HandoffFailed when it
        cannot be lengthened.
        """
        assert isinstance(connector, ExampleFiles), f"{connector.name} has no converter"
        ids = given_ids(call.body)
        if ids is None:
            asking = replace(call, path=b"/tokenize")
            ids = (await self._ask(asking, tokenize_body(call.body), Tokens)).tokens
        try:
            require_plain(call.body)
            longer = with_filler(ids, connector.block_tokens, self._watch.context_tokens, mark)
        except ValueError as error:
            raise HandoffFailed(self.origin.url, str(error), "it is answered whole") from error
        return replace(call, path=b"/v1/completions", body=ids_body(call.body, longer)), len(ids)

    def _leg_id(self, call: BackendCall) -> str:
        """An id of its own for each attempt.

        Where two legs meet by it, one that was given up could otherwise be taken for the next.
        """
        return f"{call.request_id}.{next(self._numbers)}"

    def _handoff(self, connector: Connector, claim: Claim) -> Handoff:
        attributes = msgspec.json.encode(claim).decode()
        return Handoff(claim.request_id, self.worker_id, connector.name, attributes)

    async def _prefilled(
        self, call: BackendCall, connector: Connector, request_id: str
    ) -> PrefillAnswer:
        body = prefill_body(self._own_body(call, {}), connector.prefill_fields())
        return await self._ask(call, body, PrefillAnswer, request_id)

    async def _ask(self, call: BackendCall, body: bytes, kind: type[T], request_id: str = "") -> T:
        """Return the engine's whole answer. Raises EngineRefused."""
        async with await self._send(call, body, request_id) as response:
            answer = await response.read(_REPLY_LIMIT_BYTES)
            if response.status != 200:
                raise EngineRefused(response.status, response.headers, answer)
        try:
            return msgspec.json.decode(answer, type=kind)
        except msgspec.DecodeError as error:
            raise Malformed(self.origin.url, f"answer to {call.path.decode()}: {error}") from error

    async def decode(self, call: BackendCall, handoff: Handoff | None) -> UpstreamResponse:
        """Send the client's request, with what its connector needs to find the KV.

        Raises HandoffExpired when the KV may be gone, and HandoffFailed when it cannot be used.
        """
        if handoff is None:
            return await self._send(call, self._own_body(call, {}))
        connector = self._watch.connector
        assert connector is not None, f"{self.worker_id} has no way to move KV"
        claim = msgspec.json.decode(handoff.attributes, type=Claim)
        if claim.lease_s:
            self._require(self._clock() <= claim.send_by_s, claim)
        body = self._own_body(call, connector.decode_fields(claim))
        self._watch.reuse.begin()
        try:
            response = await opened(await self._send(call, body, claim.request_id))
        except BaseException:
            self._watch.reuse.end()
            raise
        response.on_close(self._watch.reuse.end)
        if response.status >= 500:
            await self._fail(response)
        try:
            self._check_first_meeting(claim)
        except HandoffExpired:
            response.close()
            raise
        return response

    async def _fail(self, response: UpstreamResponse) -> None:
        async with response:
            said = quoted_error(await response.read(_ERROR_LIMIT_BYTES))
        raise HandoffFailed(
            self.origin.url,
            f"it could not use the KV handed over: HTTP {response.status}{said}",
            "read its log",
        )

    def _check_first_meeting(self, claim: Claim) -> None:
        """Leases are renewed only once two engines have met: until then they just run out."""
        if not claim.lease_s or claim.engine_id in self._met:
            return
        self._met.add(claim.engine_id)
        self._require(self._clock() <= claim.stamp_s + claim.lease_s, claim)

    def _require(self, in_time: bool, claim: Claim) -> None:
        if not in_time:
            age_s = self._clock() - claim.stamp_s
            raise HandoffExpired(self.origin.url, age_s, claim.lease_s)

    def _own_body(self, call: BackendCall, fields: Mapping[str, object]) -> bytes:
        if _is_form(call.headers):
            return call.body
        batch = call.batch and self._watch.takes_priority
        return own_body(call.body, call.tenant, fields, batch=batch)

    async def _send(self, call: BackendCall, body: bytes, request_id: str = "") -> UpstreamResponse:
        headers = [*call.headers, *self._headers]
        if request_id:
            headers = [field for field in headers if field[0] != _ID_HEADER]
            headers.append((_ID_HEADER, request_id.encode()))
        return await self._upstream.request(
            self.origin,
            b"POST",
            call.path,
            headers=headers,
            body=body,
            deadlines=self._deadlines,
        )

    # --- what came of it ------------------------------------------------------------------------

    def recomputed(self, handoff: Handoff, counts: TokenCounts) -> int | None:
        """Take note of what was promised. Whether that was used shows in the worker's counters.

        `usage` is no proof: after a hand-over its cached tokens are the prefill worker's.
        """
        claim = msgspec.json.decode(handoff.attributes, type=Claim)
        promised = claim.promised_tokens
        self._watch.reuse.promise((counts.prompt_tokens or 0) if promised is None else promised)
        return None

    async def release(self, handoff: Handoff, *, consumed: bool) -> None:
        """Nothing can be given back: what no decode worker reads stays for the lease."""

    def failure_of(self, status: int, body: bytes) -> Failure | None:
        """5xx and 429 may go better elsewhere; any other error is the client's to see.

        But for one: a priority that was ours is left out from now on, and the request sent again.
        """
        watch = self._watch
        if status == 400 and watch.takes_priority and _SAYS_PRIORITY.search(quoted_error(body)):
            log.warning("%s takes no priorities; batch requests go without", self.worker_id)
            watch.takes_priority = False
            return Failure.REFUSED
        return Failure.REFUSED if status >= 500 or status == 429 else None


def _is_form(headers: Headers) -> bool:
    return any(name == b"content-type" and value.startswith(_FORM) for name, value in headers)
