"""The HTTP client behind our own Protocol: pools, deadlines, raw byte relay.

Bytes of an answer's body pass as they came. One connection serves one request at a time; there is
no hidden queue: over the limit a request is refused at once.
"""

import asyncio
import errno
import ssl
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol, Self

from router.errors import (
    ClosedEarly,
    ConnectFailed,
    LimitReached,
    ReplyTooLarge,
    TimedOut,
    UpstreamError,
)
from router.origin import Origin
from router.wire import HOP_BY_HOP, Deadlines, Headers, HttpConnection

CONNECTIONS_PER_WORKER = 4096
DEFAULT_DEADLINES = Deadlines()
KEEP_ALIVE_S = 4.0
"""Below the 5 s after which uvicorn, and so vLLM and SGLang, close an idle connection."""
OWN_HEADERS = HOP_BY_HOP | {b"host", b"content-length", b"expect"}
OUT_OF_FILES = frozenset((errno.EMFILE, errno.ENFILE))


class UpstreamResponse(Protocol):
    """An answer whose head is read. Iterate over its body, then `close` it in any case."""

    status: int
    headers: Headers
    """End-to-end fields, names in lower case, as they came."""

    @property
    def at_end(self) -> bool: ...
    def __aiter__(self) -> Self: ...
    async def __anext__(self) -> bytes: ...
    async def read(self, limit_bytes: int) -> bytes: ...
    def close(self) -> None: ...
    def on_close(self, callback: Callable[[], None]) -> None: ...
    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None: ...


class Upstream(Protocol):
    """Sends requests to workers."""

    async def request(
        self,
        origin: Origin,
        method: bytes,
        path: bytes,
        *,
        headers: Headers = (),
        body: bytes = b"",
        deadlines: Deadlines = DEFAULT_DEADLINES,
    ) -> UpstreamResponse: ...

    def pool(self, origin: Origin) -> "PoolState": ...
    def forget(self, origin: Origin) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class PoolState:
    """Connections to one worker, now."""

    idle: int
    in_use: int
    limit: int


@dataclass(slots=True)
class _Pool:
    """``in_use`` counts requests from before their connect until their response is closed.

    The pool of a worker that was removed is ``forgotten``: nothing goes back to it.
    """

    idle: deque[HttpConnection] = field(default_factory=deque)
    open: set[HttpConnection] = field(default_factory=set)
    in_use: int = 0
    forgotten: bool = False


class HttpResponse:
    """The `UpstreamResponse` of `HttpUpstream`."""

    __slots__ = ("_connection", "_on_close", "_pool", "_worker_url", "headers", "status")

    def __init__(
        self,
        worker_url: str,
        pool: _Pool,
        connection: HttpConnection,
        head: tuple[int, Headers],
    ) -> None:
        self.status, self.headers = head
        self._worker_url = worker_url
        self._pool = pool
        self._connection: HttpConnection | None = connection
        self._on_close: Callable[[], None] | None = None

    @property
    def at_end(self) -> bool:
        """Nothing of the body is left: the chunk before was the last one."""
        return self._connection is None or self._connection.at_end

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        """The next bytes of the body, as the network gave them: not cut at events.

        Raises TimedOut, ClosedEarly, Malformed. Cancelling it closes the connection.
        """
        if self._connection is None:
            raise StopAsyncIteration
        chunk = await self._connection.chunk()
        if not chunk:
            raise StopAsyncIteration
        return chunk

    async def read(self, limit_bytes: int) -> bytes:
        """The rest of the body. Raises ReplyTooLarge beyond ``limit_bytes``, and as iterating."""
        chunks: list[bytes] = []
        size_bytes = 0
        async for chunk in self:
            size_bytes += len(chunk)
            if size_bytes > limit_bytes:
                self.close()
                raise ReplyTooLarge(self._worker_url, limit_bytes)
            chunks.append(chunk)
        return b"".join(chunks)

    def close(self) -> None:
        """Give the connection back when the body was read to its end, else close it at once."""
        connection, self._connection = self._connection, None
        if connection is not None:
            _release(self._pool, connection)
            if self._on_close is not None:
                self._on_close()

    def on_close(self, callback: Callable[[], None]) -> None:
        """Call this once when the response is closed, however that comes about."""
        self._on_close = callback

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


class HttpUpstream:
    """HTTP/1.1 over pooled keep-alive connections; https by the origin's scheme.

    ``limit`` bounds the requests in flight per worker. ``tls`` defaults to the system's trust.
    """

    def __init__(
        self,
        *,
        limit: int = CONNECTIONS_PER_WORKER,
        keep_alive_s: float = KEEP_ALIVE_S,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._limit = limit
        self._keep_alive_s = keep_alive_s
        self._tls = tls
        self._pools: dict[Origin, _Pool] = {}

    async def request(
        self,
        origin: Origin,
        method: bytes,
        path: bytes,
        *,
        headers: Headers = (),
        body: bytes = b"",
        deadlines: Deadlines = DEFAULT_DEADLINES,
    ) -> HttpResponse:
        """Send one request and read the head of its answer. The caller closes the response.

        ``headers`` have names in lower case; hop-by-hop fields, Host, Content-Length and Expect
        are left out or set anew, all others go as they are. HEAD and CONNECT are not served.
        When a pooled connection turns out to be closed by the worker before any byte of an
        answer, the request is sent once more over a new one. Raises ConnectFailed, LimitReached,
        TimedOut, ClosedEarly, Malformed. Cancelling it closes the connection.
        """
        wire = (_request_head(origin, method, path, headers, len(body)), body)
        pool = self._pools.get(origin)
        if pool is None:
            pool = self._pools[origin] = _Pool()
        self._count_in(origin, pool)
        connection = self._take_idle(pool)
        if connection is not None:
            try:
                return await _exchange(origin, pool, connection, wire, deadlines)
            except ClosedEarly as exc:
                if exc.received_bytes > 0:
                    raise
            self._count_in(origin, pool)
        connection = await self._connect(origin, pool, deadlines.connect_s)
        return await _exchange(origin, pool, connection, wire, deadlines)

    def pool(self, origin: Origin) -> PoolState:
        """How many connections to a worker are open."""
        pool = self._pools.get(origin) or _Pool()
        return PoolState(len(pool.idle), pool.in_use, self._limit)

    def forget(self, origin: Origin) -> None:
        """Close a removed worker's idle connections; those in use close when they are released."""
        pool = self._pools.pop(origin, None)
        if pool is not None:
            pool.forgotten = True
            while pool.idle:
                pool.idle.pop().abort()

    def close(self) -> None:
        """Close every connection; requests in flight see ClosedEarly."""
        for pool in self._pools.values():
            pool.idle.clear()
            for connection in list(pool.open):
                connection.abort()

    def _count_in(self, origin: Origin, pool: _Pool) -> None:
        if pool.in_use >= self._limit:
            raise LimitReached(
                origin.url,
                f"{pool.in_use} requests are in flight, this router's limit for one worker",
                "wait, add a worker, or raise the connection limit",
            )
        pool.in_use += 1

    def _take_idle(self, pool: _Pool) -> HttpConnection | None:
        """The freshest idle connection; those idle for too long are closed on the way."""
        oldest_s = asyncio.get_running_loop().time() - self._keep_alive_s
        while pool.idle and pool.idle[0].idle_since_s <= oldest_s:
            pool.idle.popleft().abort()
        return pool.idle.pop() if pool.idle else None

    async def _connect(self, origin: Origin, pool: _Pool, connect_s: float) -> HttpConnection:
        loop = asyncio.get_running_loop()

        def lost(connection: HttpConnection) -> None:
            pool.open.discard(connection)
            if connection in pool.idle:
                pool.idle.remove(connection)

        connection: HttpConnection | None = None
        try:
            async with asyncio.timeout(connect_s):
                _, connection = await loop.create_connection(
                    lambda: HttpConnection(origin.url, lost),
                    origin.host,
                    origin.port,
                    ssl=self._context() if origin.tls else None,
                )
        except (OSError, UnicodeError) as exc:
            raise _connect_error(origin, exc, connect_s) from exc
        finally:
            if connection is None:
                pool.in_use -= 1
        pool.open.add(connection)
        return connection

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls


async def _exchange(
    origin: Origin,
    pool: _Pool,
    connection: HttpConnection,
    wire: tuple[bytes, bytes],
    deadlines: Deadlines,
) -> HttpResponse:
    connection.start(wire, deadlines)
    try:
        head = await connection.head()
    except BaseException:
        _release(pool, connection)
        raise
    return HttpResponse(origin.url, pool, connection, head)


def _release(pool: _Pool, connection: HttpConnection) -> None:
    pool.in_use -= 1
    if not connection.finish():
        return
    if pool.forgotten:
        connection.abort()
    else:
        pool.idle.append(connection)


def _connect_error(origin: Origin, exc: OSError | UnicodeError, connect_s: float) -> UpstreamError:
    """The one classifier of what connecting raises."""
    match exc:
        case TimeoutError() if exc.errno is None:  # ours; the kernel's has a number
            return TimedOut(origin.url, "connect", connect_s)
        case OSError(errno=int(number)) if number in OUT_OF_FILES:
            return LimitReached(
                origin.url, "this process has no file descriptor left", "raise `ulimit -n`"
            )
        case _:
            return ConnectFailed(origin.url, " ".join(str(exc).split()) or type(exc).__name__)


def _request_head(
    origin: Origin,
    method: bytes,
    path: bytes,
    headers: Headers,
    body_bytes: int,
) -> bytes:
    """The request line and header fields. Raises ValueError for a line break inside one."""
    lines = [
        b"%b %b%b HTTP/1.1" % (method, origin.base_path.encode("ascii"), path),
        b"host: " + origin.authority,
    ]
    lines += [b"%b: %b" % (name, value) for name, value in headers if name not in OWN_HEADERS]
    lines.append(b"content-length: %d\r\n\r\n" % body_bytes)
    head = b"\r\n".join(lines)
    if head.count(b"\n") != len(lines) + 1:
        raise ValueError("a request header or the path holds a line break")
    return head
