"""The native worker of this project; see docs/NATIVE_PROTOCOL.md.

The prefill call answers its first line at once, so decode is dispatched while prefill runs, and
the decode worker pulls KV from the prefill worker as it is computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from router.backends.base import BackendCall, EngineRefused, PrefillDone, Target, WorkerRestarted
from router.backends.body import with_fields
from router.backends.probing import get_json
from router.errors import Malformed, UpstreamError
from router.upstream import Upstream, UpstreamResponse
from router.usage import TokenCounts
from router.wire import Deadlines, Headers
from splitserve.messages import Failure, Handoff, Role, WorkerSnapshot

CONNECTOR = "native"
T = TypeVar("T")
_LINE_LIMIT_BYTES = 64 * 1024
_BATCH_PRIORITY = (b"x-splitserve-priority", b"10")  # it is prefilled after the rest
_HANDOFF_CODES = ("handoff_failed", "handoff_refused", "handoff_broken", "handoff_corrupt")


class _Profile(msgspec.Struct):
    engine: str
    instance: str
    role: str
    models: list[str]
    connector: str
    pairing_key: str
    max_running: int
    max_context_tokens: int
    kv_capacity_tokens: int
    kv_bytes_per_token: int
    prefill_tok_s: float
    decode_tok_s: float
    step_tokens: int = 0


class _Load(msgspec.Struct):
    instance: str
    running: int
    waiting: int
    kv_used_tokens: int
    prefill_tok_s: float
    decode_tok_s: float


class _Offer(msgspec.Struct):
    handoff_id: str
    attributes: str
    prompt_tokens: int


class _Finished(msgspec.Struct):
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prefill_ms: float = 0.0
    error: dict[str, Any] | None = None


class _ErrorBody(msgspec.Struct):
    code: str | None = None


class _Envelope(msgspec.Struct):
    error: _ErrorBody


class NativeBackend:
    """A native worker in any role."""

    engine = "native"

    def __init__(self, target: Target, upstream: Upstream, deadlines: Deadlines) -> None:
        self.worker_id = target.worker_id
        self.origin = target.origin
        self._upstream = upstream
        self._role = target.role
        self._headers = target.options.headers
        self._deadlines = deadlines
        self._instance = ""

    async def probe(self) -> WorkerSnapshot:
        """Read the worker's profile. Raises ValueError when it has none."""
        status, body = await self._get(b"/splitserve/profile")
        if status != 200:
            raise ValueError(f"GET /splitserve/profile answered {status}")
        try:
            profile = msgspec.json.decode(body, type=_Profile)
        except msgspec.DecodeError as error:
            raise ValueError(f"GET /splitserve/profile: {error}") from error
        self._instance = profile.instance
        return WorkerSnapshot(
            worker_id=self.worker_id,
            role=Role(profile.role) if self._role is Role.AUTO else self._role,
            engine=profile.engine,
            models=tuple(profile.models),
            connector=profile.connector,
            pairing_key=profile.pairing_key,
            max_running=profile.max_running,
            kv_capacity_tokens=profile.kv_capacity_tokens,
            max_context_tokens=profile.max_context_tokens,
            kv_bytes_per_token=profile.kv_bytes_per_token,
            prefill_tok_s=profile.prefill_tok_s,
            decode_tok_s=profile.decode_tok_s,
            step_tokens=profile.step_tokens,
            hands_over_logits=True,
        )

    async def load(self, known: WorkerSnapshot) -> WorkerSnapshot:
        """Read gauges. Raises WorkerRestarted when another process has taken its place."""
        status, body = await self._get(b"/splitserve/load")
        if status != 200:
            raise ValueError(f"GET /splitserve/load answered {status}")
        try:
            load = msgspec.json.decode(body, type=_Load)
        except msgspec.DecodeError as error:
            raise ValueError(f"GET /splitserve/load: {error}") from error
        if load.instance != self._instance:
            raise WorkerRestarted("the worker was restarted")
        return replace(
            known,
            running=load.running,
            waiting=load.waiting,
            kv_used_tokens=load.kv_used_tokens,
            prefill_tok_s=load.prefill_tok_s,
            decode_tok_s=load.decode_tok_s,
        )

    async def _get(self, path: bytes) -> tuple[int, bytes]:
        return await get_json(self._upstream, self.origin, path, self._headers)

    async def prefill(self, call: BackendCall) -> AsyncGenerator[Handoff | PrefillDone, None]:
        """POST the client's body to the prefill route; two lines of JSON come back."""
        response = await self._upstream.request(
            self.origin,
            b"POST",
            b"/splitserve/prefill" + call.path,
            headers=self._own_headers(call),
            body=call.body,
            deadlines=self._deadlines,
        )
        async with response, contextlib.aclosing(self._lines(response)) as lines:
            if response.status != 200:
                body = await response.read(_LINE_LIMIT_BYTES)
                raise EngineRefused(response.status, response.headers, body)
            yield self._handoff(self._parse(await anext(lines, b""), _Offer))
            last = await anext(lines, b"")
            done = self._parse(last, _Finished)
            if done.error is not None:
                raise EngineRefused(502, response.headers, last)
            yield PrefillDone(done.prompt_tokens, done.cached_tokens, done.prefill_ms / 1e3)
            with contextlib.suppress(UpstreamError):
                await anext(lines, b"")  # to its end, so that the connection can be used again

    def _handoff(self, offer: _Offer) -> Handoff:
        word = offer.attributes
        if not (word.isascii() and word.isprintable()):
            raise Malformed(self.origin.url, "the attributes of a hand-off do not fit in a header")
        return Handoff(offer.handoff_id, self.worker_id, CONNECTOR, word)

    @staticmethod
    async def _lines(response: UpstreamResponse) -> AsyncGenerator[bytes, None]:
        held = b""
        async for piece in response:
            held += piece
            while b"\n" in held:
                line, _, held = held.partition(b"\n")
                yield line
            if len(held) > _LINE_LIMIT_BYTES:
                break

    def _parse(self, line: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(line, type=kind)
        except msgspec.DecodeError as error:
            raise Malformed(self.origin.url, f"prefill line: {error}") from error

    async def decode(self, call: BackendCall, handoff: Handoff | None) -> UpstreamResponse:
        """Send the client's request as it came; a hand-off travels in a header."""
        headers = self._own_headers(call)
        if handoff is not None:
            headers = (*headers, (b"x-splitserve-handoff", handoff.attributes.encode()))
        body = call.body
        if call.fresh:  # a part of the prefix cache that nobody else looks into
            body = with_fields(body, {"cache_salt": call.request_id})
        return await self._upstream.request(
            self.origin,
            b"POST",
            call.path,
            headers=headers,
            body=body,
            deadlines=self._deadlines,
        )

    def _own_headers(self, call: BackendCall) -> Headers:
        headers = (*call.headers, *self._headers) if self._headers else call.headers
        return (*headers, _BATCH_PRIORITY) if call.batch else headers

    def recomputed(self, handoff: Handoff, counts: TokenCounts) -> int | None:
        """Nothing, ever: a native decode worker that cannot get the KV answers with an error."""
        return 0

    async def release(self, handoff: Handoff, *, consumed: bool) -> None:
        """Free an offer. One that was read is free already."""
        if consumed:
            return
        path = b"/splitserve/release/" + quote(handoff.handoff_id, safe="").encode()
        async with await self._upstream.request(
            self.origin, b"POST", path, headers=self._headers, deadlines=self._deadlines
        ) as response:
            await response.read(_LINE_LIMIT_BYTES)

    def failure_of(self, status: int, body: bytes) -> Failure | None:
        """Tell a hand-off that failed from other errors by its code."""
        if status < 500 and status != 429:
            return None
        try:
            code = msgspec.json.decode(body, type=_Envelope).error.code
        except msgspec.DecodeError:
            return Failure.REFUSED
        return Failure.HANDOFF if code in _HANDOFF_CODES else Failure.REFUSED
