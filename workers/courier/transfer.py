"""Fetches a sealed file from the courier beside the prefill worker.

The bytes go from socket to disk in a thread of their own: an event loop would hand each piece
around, which costs more than the network does.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import xxhash

from workers.courier.errors import BadSlotFile, SourceFailed
from workers.courier.peers import Peers
from workers.courier.slot_head import check_head
from workers.courier.store import Promise, Store

AT_ONCE = 16
_CONNECT_S = 5.0
_IDLE_S = 30.0
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Source:
    """Where a file is: its courier's address, that one's folder, and the file's ticket."""

    url: str
    folder_id: str
    ticket: str


@dataclass(frozen=True, slots=True)
class Moved:
    """What a pull has moved; no bytes where both couriers serve one folder."""

    size_bytes: int
    took_s: float


class Puller:
    """Moves files between folders, so many at once; the others wait.

    A file that is not exactly what was promised is not kept.
    """

    def __init__(self, store: Store, peers: Peers) -> None:
        self._store = store
        self._peers = peers
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="pull")

    def close(self) -> None:
        """End the threads. Every pull is over by then."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def pull(self, promise: Promise, source: Source) -> Moved:
        """Bring a file into this folder under its name, checked to its last byte.

        Cancelling it leaves nothing behind. Raises BadSlotFile, NotSealed, FolderFull,
        ForeignSource, SourceFailed, OSError.
        """
        started_s = time.monotonic()
        if source.folder_id == self._store.folder_id:
            await asyncio.to_thread(self._store.check, promise)
            return Moved(0, time.monotonic() - started_s)
        origin = self._peers.check(source.url)
        with self._store.room(promise.name, promise.size_bytes) as part:
            fetch = _Fetch(origin, source.ticket, promise, part)
            job = self._threads.submit(fetch.run)
            running = asyncio.wrap_future(job)
            try:
                await asyncio.shield(running)
            except asyncio.CancelledError:
                fetch.abort()
                if not job.cancel():  # it has begun, and its file must not come back later
                    await asyncio.gather(running, return_exceptions=True)
                raise
            self._store.keep(part, promise.name)
        return Moved(promise.size_bytes, time.monotonic() - started_s)


class _Fetch:
    """One file on its way. `run` blocks; `abort`, from another thread, ends it soon."""

    def __init__(self, origin: str, ticket: str, promise: Promise, part: Path) -> None:
        self._origin = origin
        self._ticket = ticket
        self._promise = promise
        self._part = part
        self._aborted = False
        self._socket: socket.socket | None = None  # the connection lets go of it early
        parts = urlsplit(origin)
        assert parts.hostname is not None
        kind = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
        self._connection = kind[parts.scheme](parts.hostname, parts.port, timeout=_CONNECT_S)

    def abort(self) -> None:
        """Wake whoever waits for the network."""
        self._aborted = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def run(self) -> None:
        """Write the file to its temporary place and check it. Raises as `Puller.pull` does."""
        promise, part = self._promise, self._part
        try:
            checksum = self._receive()
        finally:
            self._connection.close()
        if checksum != promise.checksum:
            raise BadSlotFile(part, "its bytes are not those that were sealed")
        check_head(part, promise.size_bytes, promise.tokens, promise.digest)

    def _receive(self) -> str:
        """Write what the source sends, and no byte more than was promised; the checksum of it."""
        most_bytes, got_bytes = self._promise.size_bytes, 0
        digest, reply = xxhash.xxh3_128(), self._ask()
        piece = memoryview(bytearray(_PIECE_BYTES))
        with self._part.open("xb") as file:
            while count := self._read(reply, piece):
                got_bytes += count
                if got_bytes > most_bytes:
                    raise BadSlotFile(self._part, f"more than {most_bytes} bytes came")
                digest.update(piece[:count])
                file.write(piece[:count])
        if got_bytes != most_bytes:
            raise BadSlotFile(self._part, f"{got_bytes} bytes came, not {most_bytes}")
        return digest.hexdigest()

    def _ask(self) -> http.client.HTTPResponse:
        name, headers = self._promise.name, {"authorization": f"Bearer {self._ticket}"}
        try:
            self._connection.connect()
            self._socket = self._connection.sock
            if self._aborted:
                raise SourceFailed(self._origin, "nobody waits for the file any more")
            self._connection.sock.settimeout(_IDLE_S)
            self._connection.request("GET", f"/files/{name}", headers=headers)
            reply: http.client.HTTPResponse = self._connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise self._failed(error) from error
        if reply.status != 200:
            raise SourceFailed(self._origin, f"HTTP {reply.status} for {name}")
        return reply

    def _read(self, reply: http.client.HTTPResponse, piece: memoryview) -> int:
        try:
            return reply.readinto(piece)
        except (OSError, http.client.HTTPException) as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> SourceFailed:
        return SourceFailed(self._origin, " ".join(str(error).split()) or type(error).__name__)
