"""One client connection of the fake server: parses requests, plays scripts."""

import asyncio
import json
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Literal, cast

import httptools

from router.testing.replies import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    Asked,
    error_body,
    models_body,
    plain_body,
    read_request,
    shaped,
    stream_events,
)
from router.testing.script import Cut, Script

JSON_HEADERS = {"content-type": "application/json"}
SSE_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
Outcome = Literal["open", "done", "cut", "client_gone"]


@dataclass(slots=True)
class RecordedRequest:
    """A request as it arrived. Header names are lower case; a repeated header keeps its last."""

    number: int
    connection: int
    method: str = ""
    path: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    chunks_sent: int = 0
    outcome: Outcome = "open"

    def json(self) -> object:
        return json.loads(self.body)


class Switchboard:
    """What all connections of one fake share. ``changed`` is called after every change."""

    def __init__(
        self, script: Script, models: tuple[str, ...], api_key: str | None, record_limit: int
    ) -> None:
        self.script = script
        self.queued: deque[Script] = deque()
        self.models = models
        self.api_key = api_key
        self.base_path = ""
        self.routes: dict[str, tuple[int, object]] = {}
        self.requests: deque[RecordedRequest] = deque(maxlen=record_limit)
        self.connections: set[FakeConnection] = set()
        self.requests_seen = 0
        self.connections_seen = 0
        self.open_streams = 0
        self.on_change: Callable[[], None] = lambda: None

    def script_for(self, request: RecordedRequest) -> Script:
        """The next queued script, else the standing one, under the request's own header."""
        script = self.script
        if self.queued and request.method == "POST":
            script = self.queued.popleft()
        header = request.headers.get("x-fake")
        return script if header is None else script.overridden(header)


class FakeConnection(asyncio.Protocol):
    """An HTTP/1.1 server connection. Requests on it are answered one after another."""

    def __init__(self, board: Switchboard) -> None:
        self._board = board
        self._parser = httptools.HttpRequestParser(self)
        self._pending: deque[RecordedRequest] = deque()
        self._task: asyncio.Task[None] | None = None
        self._may_write = asyncio.Event()
        self._may_write.set()
        self._body: list[bytes] = []
        board.connections_seen += 1
        self._number = board.connections_seen

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._board.connections.add(self)
        self._board.on_change()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close("fin")

    def connection_lost(self, exc: Exception | None) -> None:
        self._board.connections.discard(self)
        if self._task is not None:
            self._task.cancel()
        self._may_write.set()
        self._board.on_change()

    def pause_writing(self) -> None:
        self._may_write.clear()
        self._board.on_change()

    def resume_writing(self) -> None:
        self._may_write.set()

    # httptools callbacks

    def on_message_begin(self) -> None:
        self._board.requests_seen += 1
        self._request = RecordedRequest(self._board.requests_seen, self._number)
        self._body = []

    def on_url(self, url: bytes) -> None:
        self._request.path += url.decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._request.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self._request.method = self._parser.get_method().decode("latin-1")
        self._request.body = b"".join(self._body)
        self._board.requests.append(self._request)
        self._pending.append(self._request)
        self._board.on_change()
        if self._task is None:
            self._task = asyncio.ensure_future(self._play_pending())

    # the answer

    @property
    def idle(self) -> bool:
        return self._task is None

    @property
    def blocked(self) -> bool:
        return not self._may_write.is_set()

    def close(self, cut: Cut) -> None:
        """End the connection: "fin" after what is buffered, "rst" at once."""
        if cut == "rst":
            sock = self._transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._transport.abort()
        else:
            self._transport.close()

    async def _play_pending(self) -> None:
        while self._pending:
            request = self._pending.popleft()
            try:
                await self._play(request)
            except asyncio.CancelledError:
                request.outcome = "client_gone"
                raise
            except Exception:  # a bug of the fake must not look like a silent worker
                self.close("rst")
                raise
            finally:
                self._board.on_change()
        self._task = None

    async def _play(self, request: RecordedRequest) -> None:
        try:
            script = self._board.script_for(request)
        except ValueError as exc:
            self._send_json(Script(status=400), error_body(str(exc), "fake_script", None))
            request.outcome = "done"
            return
        await asyncio.sleep(script.header_delay_s)
        if script.silent:
            await asyncio.Event().wait()
        elif script.cut_before_headers:
            request.outcome = "cut"
            self.close(script.cut or "fin")
        elif script.raw is not None:
            request.outcome = "cut"
            self._transport.write(script.raw.encode("latin-1"))
            self.close("fin")
        else:
            await self._answer(request, script)

    async def _answer(self, request: RecordedRequest, script: Script) -> None:
        path = request.path.partition("?")[0].removeprefix(self._board.base_path)
        key = self._board.api_key
        if key is not None and request.headers.get("authorization") != f"Bearer {key}":
            self._send_json(
                replace_status(script, 401), error_body("wrong key", "auth", "invalid_api_key")
            )
        elif path in self._board.routes:
            status, body = self._board.routes[path]
            self._send_json(replace_status(script, status), body)
        elif path == "/health":
            self._send_json(script, {})
        elif path == "/v1/models":
            self._send_json(script, models_body(self._board.models))
        elif path not in (CHAT_PATH, COMPLETIONS_PATH):
            self._send_json(replace_status(script, 404), error_body("no route", "not_found", None))
        elif script.status >= 400:
            self._send_json(script, error_body(f"scripted {script.status}", "fake", None))
        else:
            await self._generate(request, script)
            return
        request.outcome = "done"

    async def _generate(self, request: RecordedRequest, script: Script) -> None:
        try:
            asked = self._asked(request)
        except (ValueError, RecursionError) as exc:
            self._send_json(
                replace_status(script, 400), error_body(str(exc), "invalid_request_error", None)
            )
            request.outcome = "done"
            return
        self._board.open_streams += 1
        self._board.on_change()
        try:
            if asked.stream and script.framing != "length":
                await self._stream(request, asked, script)
            else:
                await self._plain(request, asked, script)
        finally:
            self._board.open_streams -= 1

    def _asked(self, request: RecordedRequest) -> Asked:
        """Parse a generation request. Raises ValueError for one that no engine would take."""
        path = request.path.removeprefix(self._board.base_path)
        return read_request(path, request.body)

    async def _plain(self, request: RecordedRequest, asked: Asked, script: Script) -> None:
        headers = JSON_HEADERS
        if asked.stream:
            body = b"".join(stream_events(asked, script, request.number))
            headers = SSE_HEADERS
        else:
            body = plain_body(asked, script, request.number)
        head = self._head(script, {**headers, "content-length": str(len(body))})
        if script.first_chunk_delay_s > 0:
            self._transport.write(head)
            head = b""
            await asyncio.sleep(script.first_chunk_delay_s)
        if script.cut is not None:
            request.outcome = "cut"
            self._transport.write(head + body[: len(body) // 2])
            self.close(script.cut)
            return
        self._transport.write(head + body)
        request.outcome = "done"
        if not script.keep_alive:
            self._transport.close()

    async def _stream(self, request: RecordedRequest, asked: Asked, script: Script) -> None:
        chunked = script.framing == "chunked"
        framing = {"transfer-encoding": "chunked"} if chunked else {"connection": "close"}
        self._transport.write(self._head(script, {**SSE_HEADERS, **framing}))
        await asyncio.sleep(script.first_chunk_delay_s)
        events: Iterable[bytes] = stream_events(asked, script, request.number)
        if script.split_bytes:
            events = _split(b"".join(events), script.split_bytes)
        for event in events:
            if script.cut is not None and request.chunks_sent >= script.cut_after_chunks:
                request.outcome = "cut"
                self.close(script.cut)
                return
            if request.chunks_sent == script.silent_after_chunks:
                await asyncio.Event().wait()
            self._transport.write(b"%x\r\n%b\r\n" % (len(event), event) if chunked else event)
            request.chunks_sent += 1
            self._board.on_change()
            await asyncio.sleep(script.chunk_delay_s)
            await self._may_write.wait()
        if chunked:
            self._transport.write(b"0\r\n\r\n")
        request.outcome = "done"
        if not (chunked and script.keep_alive):
            self._transport.close()

    def _send_json(self, script: Script, body: object) -> None:
        whole = shaped(body, script) if isinstance(body, dict) else body
        data = json.dumps(whole).encode()
        headers = {**JSON_HEADERS, "content-length": str(len(data))}
        self._transport.write(self._head(script, headers) + data)
        if not script.keep_alive:
            self._transport.close()

    def _head(self, script: Script, headers: dict[str, str]) -> bytes:
        whole = {**headers, **script.headers}
        if not script.keep_alive:
            whole["connection"] = "close"
        reason = HTTPStatus(script.status).phrase
        lines = [f"HTTP/1.1 {script.status} {reason}", *(f"{k}: {v}" for k, v in whole.items())]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def replace_status(script: Script, status: int) -> Script:
    """A plain answer with another status: the script's own headers and delays are not played."""
    return Script(status=status, keep_alive=script.keep_alive)


def _split(data: bytes, size: int) -> Iterable[bytes]:
    return (data[i : i + size] for i in range(0, len(data), size))
