"""A closed-loop load client that costs little: raw asyncio protocols, one request each in flight.

For CPU per request and added latency only. It cannot see queueing: use an open loop for goodput.
"""

import asyncio
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools

from benchmarks.errors import LoadFailed

REPLY_TIMEOUT_S = 30.0


@dataclass(slots=True)
class Reply:
    """One answer. Times are seconds from the request's last byte written."""

    status: int = 0
    first_byte_s: float = 0.0
    total_s: float = 0.0
    body_bytes: int = 0
    events: int = 0
    """SSE events seen, [DONE] included; 0 for a plain reply."""
    body: bytearray = field(default_factory=bytearray, repr=False)


class _Client(asyncio.Protocol):
    """One keep-alive connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reply: Reply | None = None
        self._parser = httptools.HttpResponseParser(self)

    def ask(self, data: bytes) -> asyncio.Future[Reply]:
        self._reply = Reply()
        self._done: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._transport.write(data)
        self._sent_s = time.perf_counter()
        return self._done

    def close(self) -> None:
        self._transport.close()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as exc:
            self.connection_lost(exc)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._reply is not None and not self._done.done():
            self._done.set_exception(LoadFailed(f"connection lost in mid-reply: {exc or 'FIN'}"))

    def on_body(self, body: bytes) -> None:
        reply = self._reply
        assert reply is not None
        if not reply.body:
            reply.first_byte_s = time.perf_counter() - self._sent_s
        reply.body += body

    def on_message_complete(self) -> None:
        reply, self._reply = self._reply, None
        assert reply is not None
        reply.total_s = time.perf_counter() - self._sent_s
        reply.status = self._parser.get_status_code()
        reply.body_bytes = len(reply.body)
        reply.events = reply.body.count(b"data: ")
        self._done.set_result(reply)


class ClosedLoop:
    """A load source for one URL. ``headers`` (``name: value``) go with every request."""

    def __init__(self, url: str, path: str, headers: tuple[str, ...] = ()) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._host = parts.hostname
        self._port = parts.port or 80
        lines = [f"POST {path} HTTP/1.1", f"host: {parts.netloc}", "content-type: application/json"]
        self._head = "\r\n".join([*lines, *headers, "content-length: "]).encode()

    async def run(self, bodies: Sequence[bytes], concurrency: int) -> list[Reply]:
        """Send every body, ``concurrency`` at a time over as many new keep-alive connections.

        Raises LoadFailed for a connection refused or lost, a reply that does not end, or a status
        other than 200.
        """
        todo = iter([b"%b%d\r\n\r\n%b" % (self._head, len(body), body) for body in bodies])
        replies: list[Reply] = []
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(concurrency):
                    group.create_task(self._drain(todo, replies))
        except ExceptionGroup as failed:  # one for each connection: the first says enough
            raise failed.exceptions[0] from None
        return replies

    async def _drain(self, todo: Iterator[bytes], replies: list[Reply]) -> None:
        loop = asyncio.get_running_loop()
        try:
            _, client = await loop.create_connection(_Client, self._host, self._port)
            for data in todo:
                async with asyncio.timeout(REPLY_TIMEOUT_S):
                    reply = await client.ask(data)
                if reply.status != 200:
                    raise LoadFailed(f"status {reply.status}: {bytes(reply.body[:300])!r}")
                replies.append(reply)
        except TimeoutError as error:
            raise LoadFailed(f"no whole reply within {REPLY_TIMEOUT_S:g} s") from error
        except OSError as error:
            raise LoadFailed(f"no connection to port {self._port}: {error}") from error
        client.close()
