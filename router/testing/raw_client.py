"""A client that sends bytes and leaves when it likes, for what HTTP libraries would not do."""

import asyncio
import json
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import httptools

TIMEOUT_S = 5.0


class RawAnswer:
    """An answer as it is parsed; httptools calls the methods named `on_`."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[tuple[str, str]] = []
        self._pieces: list[bytes] = []
        self.complete = False

    def header(self, name: str) -> str | None:
        """The last value of a header, or None."""
        return dict(self.headers).get(name)

    @property
    def body(self) -> bytes:
        """The body, without its framing."""
        return b"".join(self._pieces)

    def json(self) -> Any:
        """The body, parsed."""
        return json.loads(self.body)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.decode("latin-1").lower(), value.decode("latin-1")))

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        self.complete = True


class RawClient:
    """One connection. `async with RawClient(url) as client`."""

    def __init__(self, url: str, *, receive_buffer_bytes: int | None = None) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname, parts.port)
        self._limit = receive_buffer_bytes or 1 << 20
        self.received = b""

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection(
            *self._address, limit=self._limit
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.leave()

    def send(self, data: bytes) -> None:
        """Send bytes as they are."""
        self._writer.write(data)

    def post(self, path: str, body: bytes, headers: tuple[str, ...] = ()) -> None:
        """Send a POST with its content-length."""
        lines = [
            f"POST {path} HTTP/1.1",
            "host: x",
            "content-type: application/json",
            f"content-length: {len(body)}",
            *headers,
        ]
        self.send("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body)

    async def until(self, marker: bytes, timeout_s: float = TIMEOUT_S) -> bytes:
        """Read until `marker` has come; returns all that has come so far."""
        async with asyncio.timeout(timeout_s):
            while marker not in self.received:
                piece = await self._reader.read(1 << 16)
                if not piece:
                    raise EOFError(f"no {marker!r} in {self.received!r}")
                self.received += piece
        return self.received

    async def some(self, count: int) -> bytes:
        """Read until `count` bytes have come or the connection ends; returns what has come."""
        async with asyncio.timeout(TIMEOUT_S):
            while len(self.received) < count:
                piece = await self._reader.read(1 << 16)
                if not piece:
                    break
                self.received += piece
        return self.received

    async def answer(self) -> RawAnswer:
        """Read one answer to its end, or to the end of the connection. Takes it off `received`."""
        answer = RawAnswer()
        parser = httptools.HttpResponseParser(answer)
        data, self.received = self.received, b""
        async with asyncio.timeout(TIMEOUT_S):
            while not answer.complete:
                data = data or await self._reader.read(1 << 16)
                if not data:
                    break
                parser.feed_data(data)
                data = b""
        answer.status = parser.get_status_code()
        return answer

    async def end(self) -> bytes:
        """Read to the end of the connection, however it ends; returns all that has come."""
        async with asyncio.timeout(TIMEOUT_S):
            try:
                while piece := await self._reader.read(1 << 16):
                    self.received += piece
            except ConnectionResetError:
                pass
        return self.received

    def leave(self) -> None:
        """End the connection at once."""
        self._writer.transport.abort()
