"""The routes of a llama-server that the router uses for itself.

Source: llama.cpp b11434, tools/server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from router.backends.base import EngineRefused
from router.backends.probing import PROBE_DEADLINES, get_json
from router.backends.prometheus_text import read_series
from router.errors import Malformed, TimedOut
from router.origin import Origin
from router.upstream import Upstream
from router.wire import Deadlines, Headers

_LIMIT_BYTES = 64 << 20
_JSON = (b"content-type", b"application/json")
# The main loop answers these between two steps, and a step of a slow machine takes seconds.
_GAUGE_DEADLINES = Deadlines(connect_s=2.0, first_byte_s=1.0, idle_s=1.0, total_s=2.0)
_RUNNING, _WAITING = "llamacpp:requests_processing", "llamacpp:requests_deferred"
T = TypeVar("T")


class _Settings(msgspec.Struct):
    n_ctx: int


class Props(msgspec.Struct):
    """What a server is. `media_marker` is drawn anew by every process."""

    total_slots: int
    default_generation_settings: _Settings
    build_info: str = ""
    model_path: str = ""
    media_marker: str = ""

    @property
    def slot_tokens(self) -> int:
        """The context of one slot."""
        return self.default_generation_settings.n_ctx


class Meta(msgspec.Struct):
    """What the model list tells of the weights."""

    n_params: int = 0
    n_vocab: int = 0
    size: int = 0


class _Card(msgspec.Struct):
    id: str
    aliases: list[str] = []
    meta: Meta | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


@dataclass(frozen=True, slots=True)
class Gauges:
    """How busy a server is.

    Its own figures of speed are of no use: they count the tokens that a prefill for another drops.
    """

    running: int
    waiting: int


class _SlotState(msgspec.Struct):
    is_processing: bool = False


class Timings(msgspec.Struct):
    """`cache_n` prompt tokens were there already, `prompt_n` were evaluated in `prompt_ms`."""

    cache_n: int = 0
    prompt_n: int = 0
    prompt_ms: float = 0.0


class _Evaluated(msgspec.Struct):
    timings: Timings


class _Template(msgspec.Struct):
    prompt: str


class _Tokens(msgspec.Struct):
    tokens: list[int]


class SavedSlot(msgspec.Struct):
    """A slot's KV went into a file."""

    n_saved: int
    n_written: int


class RestoredSlot(msgspec.Struct):
    """A slot's KV came from a file."""

    n_restored: int
    n_read: int


class LlamaServer:
    """One server. What it answers with an error raises EngineRefused; see also UpstreamError."""

    def __init__(
        self, origin: Origin, headers: Headers, upstream: Upstream, deadlines: Deadlines
    ) -> None:
        self.origin = origin
        self._headers: Headers = (*headers, _JSON)
        self._own_headers = headers
        self._upstream = upstream
        self._deadlines = deadlines

    async def props(self) -> Props:
        """Read its properties; answered at any time. Raises ValueError when they are none."""
        status, body = await self._get(b"/props")
        if status != 200:
            raise ValueError(f"GET /props answered {status}")
        try:
            return msgspec.json.decode(body, type=Props)
        except msgspec.DecodeError as error:
            raise ValueError(f"GET /props: {error}") from error

    async def models(self) -> tuple[tuple[str, ...], Meta]:
        """Return the names of its model, and what it tells of the weights. Raises ValueError."""
        status, body = await self._get(b"/v1/models")
        if status != 200:
            raise ValueError(f"GET /v1/models answered {status}")
        try:
            cards = msgspec.json.decode(body, type=_Cards).data
        except msgspec.DecodeError as error:
            raise ValueError(f"GET /v1/models: {error}") from error
        names = [name for card in cards for name in (card.id, *card.aliases)]
        # Without --alias a model is called by its path, which differs between two machines.
        names += [base for name in names if (base := name.replace("\\", "/").rpartition("/")[2])]
        meta = next((card.meta for card in cards if card.meta is not None), Meta())
        return tuple(dict.fromkeys(names)), meta

    async def gauges(self) -> Gauges | None:
        """Ask how busy it is; None when it is too busy to say, or was started without both."""
        try:
            status, body = await self._get(b"/metrics", _GAUGE_DEADLINES)
            if status == 200:
                series = read_series(body, (_RUNNING, _WAITING))
                return Gauges(int(series.total(_RUNNING)), int(series.total(_WAITING)))
            status, body = await self._get(b"/slots", _GAUGE_DEADLINES)
            if status == 200:
                slots = msgspec.json.decode(body, type=list[_SlotState])
                return Gauges(sum(slot.is_processing for slot in slots), 0)
        except (TimedOut, ValueError):
            pass
        return None

    async def apply_template(self, body: bytes) -> str:
        """Return the prompt that a chat's body makes."""
        return (await self._post(b"/apply-template", body, _Template)).prompt

    async def tokenize(self, text: str) -> list[int]:
        """Return a prompt's ids, as the generating routes make them."""
        wish = {"content": text, "add_special": True, "parse_special": True}
        return (await self._post(b"/tokenize", msgspec.json.encode(wish), _Tokens)).tokens

    async def evaluate(
        self, ids: Sequence[int], slot: int, lora: msgspec.Raw | None = None
    ) -> Timings:
        """Compute the KV of `ids` in a slot. A token is sampled and dropped: the engine insists."""
        wish: dict[str, object] = {
            "prompt": ids,
            "n_predict": 0,
            "id_slot": slot,
            "cache_prompt": True,
            "response_fields": ["timings"],
        }
        if lora is not None:
            wish["lora"] = lora
        return (await self._post(b"/completion", msgspec.json.encode(wish), _Evaluated)).timings

    async def save(self, slot: int, name: str) -> SavedSlot:
        """Write a slot to a file of its folder; the file is whole when this returns."""
        return await self._act(slot, b"save", {"filename": name}, SavedSlot)

    async def restore(self, slot: int, name: str) -> RestoredSlot:
        """Read a slot from a file, which must be whole: one cut short ends the server."""
        return await self._act(slot, b"restore", {"filename": name}, RestoredSlot)

    async def erase(self, slot: int) -> None:
        """Empty a slot."""
        await self._act(slot, b"erase", {}, dict[str, object])

    async def _act(self, slot: int, action: bytes, wish: dict[str, object], kind: type[T]) -> T:
        path = b"/slots/%d?action=%b" % (slot, action)
        return await self._post(path, msgspec.json.encode(wish), kind)

    async def _get(self, path: bytes, deadlines: Deadlines = PROBE_DEADLINES) -> tuple[int, bytes]:
        if deadlines is PROBE_DEADLINES:
            return await get_json(self._upstream, self.origin, path, self._own_headers)
        async with await self._upstream.request(
            self.origin, b"GET", path, headers=self._own_headers, deadlines=deadlines
        ) as response:
            return response.status, await response.read(_LIMIT_BYTES)

    async def _post(self, path: bytes, body: bytes, kind: type[T]) -> T:
        async with await self._upstream.request(
            self.origin,
            b"POST",
            path,
            headers=self._headers,
            body=body,
            deadlines=self._deadlines,
        ) as response:
            answer = await response.read(_LIMIT_BYTES)
        if response.status != 200:
            raise EngineRefused(response.status, response.headers, answer)
        try:
            return msgspec.json.decode(answer, type=kind)
        except msgspec.DecodeError as error:
            where = path.partition(b"?")[0].decode()
            raise Malformed(self.origin.url, f"POST {where}: {error}") from error
