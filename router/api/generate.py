"""The hot route: any `POST /v1/...` with a model, relayed to whoever the scheduler names.

A plain ASGI endpoint. It parses a handful of fields and passes all bytes on as they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Iterator, Mapping
from itertools import count

from starlette.types import Receive, Scope, Send

from router.answer import Answer
from router.api.auth import Keyring
from router.api.budgets import Budgets
from router.api.errors import ApiError, from_reject
from router.api.intake import FORM, JSON, content_kind, read
from router.backends.base import BackendCall
from router.dispatch import Dispatcher
from router.endings import AbandonedError, RejectedError
from router.event_stream import is_event_stream
from router.pair_watch import PairWatch
from router.settings import RouterSettings
from router.telemetry.records import Record, workers_of
from router.wire import Headers, end_to_end
from splitserve.scheduling.flight import is_batch

log = logging.getLogger("splitserve.api")

# Not passed on to workers: keys of this hop, and fields that the hand-off or the framing own.
_KEPT_BACK = frozenset(
    (
        b"host",
        b"content-length",
        b"authorization",
        b"cookie",
        b"x-api-key",
        b"api-key",
        b"accept-encoding",
        b"expect",
        b"x-request-id",
        b"x-data-parallel-rank",
        b"x-vllm-priority",
    )
)
# Not passed back: ours are set anew, and the server adds its own date.
_OURS = frozenset((b"x-request-id", b"date", b"server"))
_PREFIX = b"x-splitserve-"
_FORCING = (b"x-splitserve-plan", b"x-splitserve-worker")


def request_ids() -> Iterator[str]:
    """Yield ids that no client can guess or repeat."""
    prefix = secrets.token_hex(6)
    return (f"{prefix}-{number:x}" for number in count())


class GenerateEndpoint:
    """Answers one HTTP request; shared by all."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        settings: RouterSettings,
        keyring: Keyring,
        watch: PairWatch | None = None,
    ) -> None:
        self._dispatcher = dispatcher
        self._watch = watch
        self._settings = settings
        self._keyring = keyring
        self._weights = {tenant.name: tenant.weight for tenant in settings.tenants}
        self._budgets = Budgets(settings.tenants, dispatcher.clock)
        self._ids = request_ids()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request."""
        headers: dict[bytes, bytes] = dict(scope["headers"])
        request_id = next(self._ids)
        client_id = headers.get(b"x-request-id", b"")[:200]
        output = ClientOutput(send, client_id or request_id.encode())
        try:
            tenant = self._tenant(headers)
            body = await self._body(headers, receive)
            intake = read(
                scope["path"],
                body,
                headers,
                self._settings,
                request_id=request_id,
                tenant=tenant,
                tenant_weight=self._weights.get(tenant, 1.0),
            )
            record = Record(
                intake.request, time.time(), self._dispatcher.clock(), client_id.decode("latin-1")
            )
            output.record = record
            passed_on = _passed_on(scope["headers"], request_id)
            call = BackendCall(
                _target(scope), body, passed_on, request_id, tenant, is_batch(intake.request)
            )
            answer = Answer(self._dispatcher, call, record, stream=intake.stream, watch=self._watch)
            prompt_tokens = intake.request.prompt_tokens
            self._budgets.admit(tenant, prompt_tokens)
            try:
                await self._run(answer, output, receive)
            finally:
                self._budgets.settle(tenant, prompt_tokens, record)
        except ApiError as error:
            await output.fail(error)
        except AbandonedError:
            return
        except Exception:  # task boundary: the client must hear that it ended
            log.exception("request %s", request_id)
            if not output.begun:
                message = "the router made an error; its log says more"
                await output.fail(ApiError(500, message, code="internal_error"))

    def _tenant(self, headers: Mapping[bytes, bytes]) -> str:
        forcing = any(name in headers for name in _FORCING)
        if forcing and self._keyring.is_admin(headers):
            return ""
        tenant = self._keyring.tenant(headers)
        if forcing and not self._keyring.open:
            message = (
                "x-splitserve-plan and -worker need the admin key where tenants are configured"
            )
            raise ApiError(403, message, code="admin_only")
        return tenant

    async def _body(self, headers: Mapping[bytes, bytes], receive: Receive) -> bytes:
        kind = content_kind(headers)
        if kind not in (JSON, FORM):
            name = kind[:60].decode("latin-1")
            detail = f"content-type {name!r}: send application/json, or multipart/form-data"
            raise ApiError(415, detail)
        limit_bytes = self._settings.limits.max_body_bytes
        if int(headers.get(b"content-length", b"0")) > limit_bytes:
            raise ApiError(413, f"the body is over {limit_bytes} bytes; send less")
        pieces: list[bytes] = []
        size_bytes = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise AbandonedError
            piece = message.get("body", b"")
            size_bytes += len(piece)
            if size_bytes > limit_bytes:
                raise ApiError(413, f"the body is over {limit_bytes} bytes; send less")
            pieces.append(piece)
            if not message.get("more_body", False):
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    @staticmethod
    async def _run(answer: Answer, output: ClientOutput, receive: Receive) -> None:
        watch = asyncio.ensure_future(_watch(receive, answer))
        try:
            await answer.run(output)
        except RejectedError as error:
            await output.reject(error)
        finally:
            watch.cancel()


async def _watch(receive: Receive, answer: Answer) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        while (await receive())["type"] != "http.disconnect":
            pass
        answer.abandon()


def _target(scope: Scope) -> bytes:
    """Return path and query as they came. Raises ApiError for a path that leaves /v1."""
    if any(part in ("..", ".") for part in scope["path"].split("/")):
        raise ApiError(404, "the path has a '.' or '..' segment; write it out", code="bad_path")
    path: bytes = scope["raw_path"]
    query: bytes = scope["query_string"]
    return path + b"?" + query if query else path


def _passed_on(headers: Headers, request_id: str) -> list[tuple[bytes, bytes]]:
    kept = [
        field
        for field in end_to_end(headers)
        if field[0] not in _KEPT_BACK and not field[0].startswith(_PREFIX)
    ]
    kept.append((b"x-request-id", request_id.encode()))
    return kept


class ClientOutput:
    """The client's side of the connection, with the headers that tell what was done."""

    def __init__(self, send: Send, echoed_id: bytes) -> None:
        self._send = send
        self._echoed_id = echoed_id
        self._takes_events = False
        self.begun = False
        self.record: Record | None = None

    async def start(self, status: int, headers: Headers) -> None:
        """Send the head: the engine's fields, then ours."""
        fields = [
            field for field in headers if field[0] not in _OURS and not field[0].startswith(_PREFIX)
        ]
        fields += self._own_headers()
        framed = any(name == b"content-length" for name, _ in fields)
        self._takes_events = is_event_stream(headers) and not framed
        self.begun = True
        await self._send({"type": "http.response.start", "status": status, "headers": fields})

    async def write(self, piece: bytes) -> None:
        """Pass bytes on."""
        await self._send({"type": "http.response.body", "body": piece, "more_body": True})

    async def finish(self) -> None:
        """End the answer."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def reject(self, error: RejectedError) -> None:
        """Answer a refusal: the engine's own words where they are the client's business.

        An answer that had begun and is no event stream is left unfinished: the server closes the
        connection then, which is all that can tell the client.
        """
        known = from_reject(error.reject, timed_out=error.timed_out)
        if error.begun:
            if self._takes_events:
                await self.write(known.event())
                await self.finish()
        elif error.answer is not None and error.answer.status < 500:
            await self.start(error.answer.status, error.answer.headers)
            await self.write(error.answer.body)
            await self.finish()
        else:
            await self.fail(known)

    async def fail(self, error: ApiError) -> None:
        """Answer an error of our own."""
        body = error.body()
        fields = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            *self._own_headers(),
        ]
        if error.retry_after_s is not None:
            fields.append((b"retry-after", str(max(1, round(error.retry_after_s))).encode()))
        status = {"type": "http.response.start", "status": error.status, "headers": fields}
        self.begun = True
        await self._send(status)
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    def _own_headers(self) -> list[tuple[bytes, bytes]]:
        own = [(b"x-request-id", self._echoed_id)]
        record = self.record
        if record is None or record.choice.chosen is None:
            return own
        chosen = record.choice.chosen
        workers = ",".join(f"{part}={name}" for part, name in workers_of(chosen).items())
        own += [
            (b"x-splitserve-request-id", record.request.request_id.encode()),
            (b"x-splitserve-plan", chosen.plan.value.encode()),
            (b"x-splitserve-workers", workers.encode()),
            (b"x-splitserve-queue-ms", b"%.2f" % (record.queue_s * 1e3)),
            (b"x-splitserve-predicted-ttft-ms", b"%.1f" % (chosen.predicted_ttft_s * 1e3)),
        ]
        return own
