"""The worker's HTTP application."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from workers.native.engine.errors import EngineError
from workers.native.handoff.errors import HandoffError
from workers.native.handoff.reference import HandoffReference
from workers.native.models.errors import ModelError
from workers.native.server import metrics, wire
from workers.native.server.chat import ChatAnswer
from workers.native.server.completions import CompletionAnswer
from workers.native.server.errors import ApiError, bad_request, classify
from workers.native.server.fields import ChatFields, CompletionFields, TokenizeFields, parse
from workers.native.server.generation import OutputStream
from workers.native.server.service import HANDOFF_HEADER, PRIORITY_HEADER, Service

log = logging.getLogger("splitserve.worker")

MAX_BODY_BYTES = 16 << 20
T = TypeVar("T")
Answer = ChatAnswer | CompletionAnswer


class ClientGoneError(Exception):
    """The client closed its connection before the answer began."""


class GuardedStream(StreamingResponse):
    """A stream that closes `stack` when it ends, also when the client left before it began."""

    def __init__(
        self, stack: contextlib.AsyncExitStack, content: AsyncIterator[bytes], **more: Any
    ) -> None:
        super().__init__(content, **more)
        self._stack = stack

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        async with self._stack:
            await super().__call__(scope, receive, send)


def create_app(service: Service) -> FastAPI:
    """Build the application around a loaded model."""
    app = FastAPI(title="splitserve native worker", docs_url=None, redoc_url=None)
    app.add_exception_handler(ApiError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    for kind in (ModelError, EngineError, HandoffError, Exception):
        app.add_exception_handler(kind, _answer_error)
    app.add_exception_handler(ClientDisconnect, _nobody_there)
    _add_openai_routes(app, service)
    _add_state_routes(app, service)
    _add_router_routes(app, service)
    return app


def _add_openai_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        fields = parse(ChatFields, await _body(request))
        return await _generate(service, request, ChatAnswer(service, fields))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        fields = parse(CompletionFields, await _body(request))
        return await _generate(service, request, CompletionAnswer(service, fields))

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model_card(service)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return _model_card(service)

    @app.post("/tokenize")
    async def tokenize(request: Request) -> dict[str, Any]:
        fields = parse(TokenizeFields, await _body(request))
        if fields.messages is not None:
            chat = ChatFields(model=service.model_name, messages=fields.messages)
            tokens = await service.chat_prompt(chat)
        elif fields.prompt is not None:
            tokens = await service.tokenize(fields.prompt, special=fields.add_special_tokens)
        else:
            raise bad_request("give 'prompt' or 'messages'", "prompt")
        limit = service.engine.settings.max_context_tokens
        return {"tokens": tokens, "count": len(tokens), "max_model_len": limit}


def _add_state_routes(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> Response:
        if service.engine.alive:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "the engine has stopped; restart the worker"}, 503)

    @app.get("/metrics")
    async def show_metrics() -> Response:
        return Response(metrics.render(service.engine), media_type="text/plain; version=0.0.4")


def _add_router_routes(app: FastAPI, service: Service) -> None:
    @app.get("/splitserve/profile")
    async def profile() -> dict[str, Any]:
        return wire.profile(service)

    @app.get("/splitserve/load")
    async def load() -> dict[str, Any]:
        return wire.load(service)

    @app.post("/splitserve/release/{offer_id}")
    async def release(offer_id: str) -> dict[str, bool]:
        return {"released": service.engine.offers.release(offer_id)}

    @app.post("/splitserve/prefill/v1/chat/completions")
    async def prefill_chat(request: Request) -> Response:
        fields = parse(ChatFields, await _body(request))
        return await _prefill(service, request, ChatAnswer(service, fields))

    @app.post("/splitserve/prefill/v1/completions")
    async def prefill_completions(request: Request) -> Response:
        fields = parse(CompletionFields, await _body(request))
        return await _prefill(service, request, CompletionAnswer(service, fields))


async def _prefill(service: Service, request: Request, answer: Answer) -> Response:
    stream = OutputStream(service.engine)
    _prioritise(service, request, answer)
    wishes = await answer.wishes(stream, None)
    if len(wishes) != 1:
        raise bad_request("several prompts cannot share one hand-off", "prompt")
    host = request.url.hostname or "127.0.0.1"
    reply = wire.PrefillReply(service, wishes[0], stream, host)
    try:
        offer = reply.open()
    except Exception as error:  # task boundary: the client must get an answer
        raise classify(error) from error
    stack = contextlib.AsyncExitStack()
    stack.callback(reply.abandon)
    return GuardedStream(stack, reply.lines(offer), media_type="application/x-ndjson")


def _prioritise(service: Service, request: Request, answer: Answer) -> None:
    header = request.headers.get(PRIORITY_HEADER)
    answer.fields.priority = service.priority_from(header, answer.fields.priority)


async def _generate(service: Service, request: Request, answer: Answer) -> Response:
    """Run a request. The status is sent when the first token is there, so errors keep theirs."""
    stack = contextlib.AsyncExitStack()
    try:
        _prioritise(service, request, answer)
        source = service.handoff_from(request.headers.get(HANDOFF_HEADER))
        stream = await stack.enter_async_context(OutputStream(service.engine))
        response = await _or_gone(request, _begin(answer, stream, source, stack))
    except ClientGoneError:
        await stack.aclose()
        return Response(status_code=499)
    except BaseException as error:  # task boundary: the engine's errors become answers
        await stack.aclose()
        if isinstance(error, Exception):
            raise classify(error) from error
        raise
    return response


async def _begin(
    answer: Answer,
    stream: OutputStream,
    source: HandoffReference | None,
    stack: contextlib.AsyncExitStack,
) -> Response:
    for wish in await answer.wishes(stream, source):
        stream.start(wish)
    if not answer.fields.stream:
        body = await answer.whole(stream)
        await stack.aclose()
        return JSONResponse(body, headers=wire.report_headers(stream.reports))
    chunks = answer.chunks(stream)
    first = await anext(chunks)
    headers = {"cache-control": "no-cache", **wire.report_headers(stream.reports)}
    relay = _relay(first, chunks)
    return GuardedStream(stack, relay, media_type="text/event-stream", headers=headers)


async def _relay(first: bytes, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    try:
        yield first
        async for chunk in chunks:
            yield chunk
    except Exception as error:  # task boundary: bytes are out, so the stream carries the error
        log.warning("a stream broke: %s", error)
        yield wire.error_event(error)


async def _or_gone(request: Request, work: Awaitable[T]) -> T:
    """Await `work`, or raise ClientGoneError as soon as the client disconnects."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        for each in (task, gone):
            if not each.done():
                each.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await each


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request) -> bytes:
    """Read the body, bounded, and check that it says it is JSON."""
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"content-type {kind[:60]!r}: send application/json")
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise ApiError(413, f"the body is over {MAX_BODY_BYTES >> 20} MiB; send less")
    return bytes(body)


def _model_card(service: Service) -> dict[str, Any]:
    return {
        "id": service.model_name,
        "object": "model",
        "created": int(service.started_s),
        "owned_by": "splitserve",
        "max_model_len": service.engine.settings.max_context_tokens,
    }


async def _answer_error(request: Request, error: Exception) -> JSONResponse:
    known = classify(error)
    if isinstance(error, ModelError):
        known = bad_request(str(error))
    if known.status >= 500 and known.code == "internal_error":
        log.error("unexpected error", exc_info=error)
    headers = {"retry-after": str(known.retry_after_s)} if known.retry_after_s else None
    return JSONResponse(known.envelope(), known.status, headers)


async def _nobody_there(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # the client left in the middle of its body


async def _answer_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    return JSONResponse(ApiError(error.status_code, message).envelope(), error.status_code)
