"""The courier beside a llama-server, as the router speaks to it; see workers/courier/app.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar
from urllib.parse import quote

import msgspec
import xxhash

from router.backends.base import quoted_error
from router.backends.probing import PROBE_DEADLINES
from router.errors import HandoffFailed, UpstreamError
from router.origin import Origin
from router.upstream import Upstream
from router.wire import Deadlines, Headers

_LIMIT_BYTES = 1 << 20
_JSON = (b"content-type", b"application/json")
T = TypeVar("T")


class Layout(msgspec.Struct):
    """How a server lays out its KV, as its slot files show it."""

    kv: str
    v_order: str
    streams: int
    shape: str
    bytes_per_token: int


class ModelFile(msgspec.Struct):
    """The model file beside a courier."""

    name: str
    size_bytes: int
    sampled_hash: str


class Profile(msgspec.Struct):
    """What a courier says of itself. `converts`: other engines' KV into slot files."""

    folder: str
    model: ModelFile | None = None
    converts: bool = False


class Saved(msgspec.Struct):
    """A slot file as the engine has written it; `digest` is of the tokens it must hold."""

    name: str
    size_bytes: int
    tokens: int
    digest: str


class Seal(msgspec.Struct):
    """What a courier says of a file that is as it should be."""

    checksum: str
    ticket: str
    folder: str
    layout: Layout | None = None


class Parcel(msgspec.Struct):
    """A sealed file and where it is: the attributes of a hand-off, as JSON.

    `spent_s` is what saving and sealing it took.
    """

    saved: Saved
    seal: Seal
    url: str
    spent_s: float = 0.0


class Converted(msgspec.Struct):
    """A slot file made of another engine's KV."""

    size_bytes: int
    tokens: int


def tokens_digest(ids: Sequence[int]) -> str:
    """Return the digest of a file's tokens: xxh3-64 of them as little-endian i32, in hex."""
    raw = b"".join(each.to_bytes(4, "little", signed=True) for each in ids)
    return xxhash.xxh3_64_hexdigest(raw)


class CourierClient:
    """One courier. All calls raise HandoffFailed, whether it refuses or cannot be reached."""

    def __init__(self, origin: Origin, key: str, upstream: Upstream, deadlines: Deadlines) -> None:
        self.origin = origin
        self._upstream = upstream
        self._deadlines = deadlines
        bearer = ((b"authorization", f"Bearer {key}".encode()),) if key else ()
        self._headers: Headers = (*bearer, _JSON)

    async def profile(self) -> Profile:
        """Ask what it is. Under a short deadline."""
        return await self._ask(b"GET", b"/profile", Profile, deadlines=PROBE_DEADLINES)

    async def seal(self, saved: Saved) -> Seal:
        """Have a file checked that the engine beside it has saved."""
        return await self._ask(b"POST", b"/seal", Seal, msgspec.to_builtins(saved))

    async def pull(self, parcel: Parcel) -> None:
        """Have it fetch a file and check it. Returns when the file is there under its name.

        Cancelling it ends the transfer.
        """
        seal = parcel.seal
        source = {"url": parcel.url, "folder": seal.folder, "ticket": seal.ticket}
        saved = msgspec.to_builtins(parcel.saved)
        wish = {**saved, "checksum": seal.checksum, "source": source}
        await self._ask(b"POST", b"/pull", dict[str, object], wish)

    async def convert(self, wish: dict[str, object]) -> Converted:
        """Have it write a slot file from what another engine left in a folder of its own."""
        return await self._ask(b"POST", b"/convert", Converted, wish)

    async def discard(self, name: str) -> None:
        """Delete a file; one that is not there is no error."""
        path = b"/files/" + quote(name, safe="").encode()
        await self._ask(b"DELETE", path, dict[str, object], deadlines=PROBE_DEADLINES)

    async def _ask(
        self,
        method: bytes,
        path: bytes,
        kind: type[T],
        wish: dict[str, object] | None = None,
        deadlines: Deadlines | None = None,
    ) -> T:
        try:
            async with await self._upstream.request(
                self.origin,
                method,
                path,
                headers=self._headers,
                body=b"" if wish is None else msgspec.json.encode(wish),
                deadlines=deadlines or self._deadlines,
            ) as response:
                body = await response.read(_LIMIT_BYTES)
        except UpstreamError as error:
            raise HandoffFailed(
                error.worker_url, f"its courier: {error.cause}", "see whether it runs"
            ) from error
        if response.status != 200:
            said = f"courier: HTTP {response.status}{quoted_error(body)}"
            raise HandoffFailed(self.origin.url, said, "read the courier's log")
        try:
            return msgspec.json.decode(body, type=kind)
        except msgspec.DecodeError as error:
            raise HandoffFailed(
                self.origin.url, f"it does not answer like a courier ({error})", "correct its URL"
            ) from error
