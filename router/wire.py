"""One HTTP/1.1 client connection: writes a request, parses the answer, hands out its bytes.

llhttp (through httptools) parses. Chunked framing is taken off, since it belongs to one hop (RFC
9112, 7.1); the payload bytes are passed on as they came, neither decoded nor cut again.
"""

import asyncio
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import httptools

from router.errors import ClosedEarly, Malformed, Phase, TimedOut, UpstreamError

Headers = Sequence[tuple[bytes, bytes]]

HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
"""Header fields that end at one hop (RFC 9110, 7.6.1), in lower case."""
MAX_HEAD_BYTES = 65_536
PAUSE_BYTES = 262_144
"""Payload held for a slow reader before the socket is left alone."""
BODILESS_STATUS = frozenset((204, 304))


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Bounds in seconds; None is no bound.

    ``first_byte_s`` runs from the request written to the first byte of the answer's body, so an
    early head does not stop it. ``idle_s`` runs between two reads of the body and stands still
    while our own reader is the slow one.
    """

    connect_s: float = 5.0
    first_byte_s: float = 60.0
    idle_s: float = 60.0
    total_s: float | None = None


def end_to_end(headers: Headers) -> list[tuple[bytes, bytes]]:
    """Without the hop-by-hop fields, those named by Connection included. Names in lower case."""
    named = [value for name, value in headers if name == b"connection"]
    if not named:
        return [field for field in headers if field[0] not in HOP_BY_HOP]
    dropped = HOP_BY_HOP.union(
        token.strip().lower() for value in named for token in value.split(b",")
    )
    return [field for field in headers if field[0] not in dropped]


class HttpConnection(asyncio.Protocol):
    """A connection that serves one request at a time: `start`, `head`, `chunk` until b"".

    ``on_lost`` is called once, when the connection is gone or can serve nothing more.
    """

    def __init__(self, worker_url: str, on_lost: Callable[["HttpConnection"], None]) -> None:
        self._worker_url = worker_url
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._busy = False
        self._usable = True
        self.idle_since_s = 0.0

    # the request

    def start(self, wire: tuple[bytes, bytes], deadlines: Deadlines) -> None:
        """Write a request (head, body). The connection must be idle."""
        assert not self._busy
        assert self._usable
        self._busy = True
        self._complete = False
        self._error: UpstreamError | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_read = False
        self._until_close = False
        self._chunks: list[bytes] = []
        self._held_bytes = 0
        self._paused = False
        self._body_begun = False
        self.received_bytes = 0
        self._deadlines = deadlines
        self._start_s = self._read_s = self._loop.time()
        self._transport.writelines(wire)
        self._check_deadline()

    async def head(self) -> tuple[int, Headers]:
        """Status and headers (names in lower case, hop-by-hop left out).

        Raises TimedOut, ClosedEarly, Malformed. Cancelling it closes the connection.
        """
        while not self._head_read:
            if self._error is not None:
                raise self._error
            await self._readable()
        return self._status, self._headers

    async def chunk(self) -> bytes:
        """The payload that has come since the last call, b"" at the end.

        What came before a failure is handed out before the failure is raised. Raises TimedOut,
        ClosedEarly, Malformed. Cancelling it closes the connection.
        """
        while not self._chunks:
            if self._error is not None:
                raise self._error
            if self._complete:
                return b""
            await self._readable()
        chunks = self._chunks
        self._chunks = []
        self._held_bytes = 0
        if self._paused:
            self._paused = False
            self._read_s = self._loop.time()
            self._transport.resume_reading()
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)

    @property
    def at_end(self) -> bool:
        """The whole answer has come and has been handed out."""
        return self._complete and not self._chunks

    def finish(self) -> bool:
        """End the request: True when the connection can serve another one, else it is closed.

        A reader that still waits in another task gets ClosedEarly.
        """
        assert self._busy
        self._busy = False
        self._stop_timer()
        if (
            self._complete
            and self._usable
            and self._waiter is None
            and self._transport.get_write_buffer_size() == 0
        ):
            self.idle_since_s = self._loop.time()
            return True
        self._fail(ClosedEarly(self._worker_url, self.received_bytes, "closed by this router"))
        return False

    def abort(self) -> None:
        """Close at once, so that the worker notices; unsent bytes are dropped."""
        self._usable = False
        self._stop_timer()
        self._transport.abort()

    async def _readable(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        except asyncio.CancelledError:
            self.abort()
            raise
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, error: UpstreamError) -> None:
        if self._error is None and not self._complete:
            self._error = error
        self.abort()
        self._wake()

    # deadlines: one timer a request, moved on when it fires rather than at every read

    def _deadline(self) -> tuple[float, Phase, float]:
        limits = self._deadlines
        phase: Phase = "first_byte"
        since_s, limit_s = self._start_s, limits.first_byte_s
        if self._body_begun:
            since_s = self._loop.time() if self._paused else self._read_s
            phase, limit_s = "idle", limits.idle_s
        total_s = limits.total_s
        if total_s is not None and self._start_s + total_s < since_s + limit_s:
            since_s, phase, limit_s = self._start_s, "total", total_s
        return since_s + limit_s, phase, limit_s

    def _check_deadline(self) -> None:
        at_s, phase, limit_s = self._deadline()
        now_s = self._loop.time()
        if now_s < at_s:
            # The idle bound may start to run at any moment from now on.
            at_s = min(at_s, now_s + self._deadlines.idle_s)
            self._timer = self._loop.call_at(at_s, self._check_deadline)
        else:
            self._fail(TimedOut(self._worker_url, phase, limit_s))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def data_received(self, data: bytes) -> None:
        if not self._busy:  # nothing was asked: what comes now would answer the next request
            self.abort()
            return
        self._read_s = self._loop.time()
        self.received_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            self._fail(Malformed(self._worker_url, _one_line(exc)))
            return
        if not self._head_read and self.received_bytes > MAX_HEAD_BYTES:
            self._fail(Malformed(self._worker_url, f"its head is over {MAX_HEAD_BYTES} bytes"))
        elif self._held_bytes > PAUSE_BYTES and not self._paused and not self._complete:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._usable = False
        self._stop_timer()
        if self._busy and not self._complete and self._error is None:
            if self._until_close and exc is None:
                self._complete = True
            else:
                reason = "reset" if exc is not None else "end of stream"
                self._error = ClosedEarly(self._worker_url, self.received_bytes, reason)
        self._wake()
        self._on_lost(self)

    # httptools callbacks

    def on_message_begin(self) -> None:
        if self._complete:  # bytes beyond the answer: never take them for the next one
            self._usable = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._head_read:  # after the head these are trailers, which end at this hop
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._complete:
            return
        status = self._parser.get_status_code()
        if status < 200:  # interim (100, 103): the answer is still to come
            self._headers = []
            return
        self._status = status
        names = {name for name, _ in self._headers}
        framed = b"content-length" in names or b"transfer-encoding" in names
        self._until_close = not framed and status not in BODILESS_STATUS
        self._headers = end_to_end(self._headers)
        self._head_read = True

    def on_body(self, body: bytes) -> None:
        if self._complete:
            return
        self._body_begun = True
        self._chunks.append(body)
        self._held_bytes += len(body)

    def on_message_complete(self) -> None:
        if self._head_read:
            self._complete = True
            self._usable = self._usable and self._parser.should_keep_alive()


def _one_line(exc: Exception) -> str:
    return " ".join(str(exc).split())
