"""Fetches a sealed file from the courier beside the prefill worker."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import xxhash

from workers.courier.errors import BadSlotFile, SourceFailed
from workers.courier.peers import Peers
from workers.courier.slot_head import check_head
from workers.courier.store import Promise, Store

_TIMEOUT = httpx.Timeout(30.0, connect=5.0)
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
    """Moves files between folders. One that is not exactly what was promised is not kept."""

    def __init__(self, store: Store, peers: Peers) -> None:
        self._store = store
        self._peers = peers
        # No proxy of the environment stands between two couriers, and none is to be believed.
        self._client = httpx.AsyncClient(timeout=_TIMEOUT, trust_env=False, follow_redirects=False)

    async def close(self) -> None:
        """Close the connections to other couriers."""
        await self._client.aclose()

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
            checksum = await self._fetch(origin, source.ticket, promise, part)
            if checksum != promise.checksum:
                raise BadSlotFile(part, "its bytes are not those that were sealed")
            size_bytes, tokens, digest = promise.size_bytes, promise.tokens, promise.digest
            await asyncio.to_thread(check_head, part, size_bytes, tokens, digest)
            self._store.keep(part, promise.name)
        return Moved(promise.size_bytes, time.monotonic() - started_s)

    async def _fetch(self, origin: str, ticket: str, promise: Promise, part: Path) -> str:
        """Write what the source sends, and no byte more than was promised."""
        headers = {"authorization": f"Bearer {ticket}", "accept-encoding": "identity"}
        digest = xxhash.xxh3_128()
        got_bytes = 0
        try:
            with part.open("xb") as file:
                async with self._client.stream(
                    "GET", f"{origin}/files/{promise.name}", headers=headers
                ) as reply:
                    if reply.status_code != 200:
                        raise SourceFailed(origin, f"HTTP {reply.status_code} for {promise.name}")
                    async for piece in reply.aiter_raw(_PIECE_BYTES):
                        got_bytes += len(piece)
                        if got_bytes > promise.size_bytes:
                            break
                        digest.update(piece)
                        await asyncio.to_thread(file.write, piece)
        except httpx.HTTPError as error:
            cause = " ".join(str(error).split()) or type(error).__name__
            raise SourceFailed(origin, cause) from error
        if got_bytes != promise.size_bytes:
            least = "more than " if got_bytes > promise.size_bytes else ""
            what = f"{least}{min(got_bytes, promise.size_bytes)} bytes came, not"
            raise BadSlotFile(part, f"{what} {promise.size_bytes}")
        return digest.hexdigest()
