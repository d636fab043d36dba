"""A scripted native worker over HTTP: docs/NATIVE_PROTOCOL.md without a model and without KV.

In a test::

    async with FakeNative(role="prefill") as p, FakeNative(role="decode") as d:
        ...                                  # route to p.url and d.url
        await p.until(lambda fake: fake.offers["offer-1"] == "released")

What it answers on `/v1/...` is scripted as in `FakeOpenAI`; `prefill_queue` scripts the prefill
calls. Everything else (profile, load, models, release) always behaves.
"""

import asyncio
import base64
import itertools
import json
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal, Self

from router.testing.connection import FakeConnection, RecordedRequest, Switchboard
from router.testing.fake_openai import BACKLOG, FakeOpenAI
from router.testing.replies import error_body
from router.testing.script import Script

HANDOFF_HEADER = "x-splitserve-handoff"
PREFILL_PREFIX = "/splitserve/prefill/v1/"
RELEASE_PREFIX = "/splitserve/release/"
TRANSFER_MS = 1.5
TRANSFER_BYTES = 4096

Stop = Literal["", "before_offer", "after_offer"]
OfferState = Literal["open", "ready", "failed", "released"]


@dataclass(frozen=True, slots=True)
class PrefillScript:
    """What one prefill call does. `stop_at` says where it ends; "" goes to its end."""

    status: int = 200
    code: str | None = None
    """Of the error answer, where `status` is one, or of the second line."""
    stop_at: Stop = ""
    silent: bool = False
    """At `stop_at` say nothing more, instead of closing the connection."""
    gate: asyncio.Event | None = None
    """Waited for before the second line."""
    second_line_error: bool = False
    raw_line: str | None = None
    """Sent in place of the first line; the call ends there."""
    prompt_tokens: int = 8
    cached_tokens: int = 0
    prefill_ms: float = 2.0


@dataclass(slots=True)
class NativeProfile:
    """What `/splitserve/profile` says; change fields to play a restart or another worker."""

    role: str
    models: tuple[str, ...]
    engine: str = "native"
    version: str = "fake"
    instance: str = "first"
    connector: str = "native"
    pairing_key: str = "weights=w;layout=l;dtype=f32"
    max_running: int = 64
    max_context_tokens: int = 4096
    kv_capacity_tokens: int = 1 << 20
    kv_bytes_per_token: int = 256
    prefill_tok_s: float = 10_000.0
    decode_tok_s: float = 100.0


class NativeBoard(Switchboard):
    """What all connections of one fake native worker share."""

    def __init__(
        self, script: Script, profile: NativeProfile, handoff_code: str | None, record_limit: int
    ) -> None:
        super().__init__(script, profile.models, None, record_limit)
        self.profile = profile
        self.handoff_code = handoff_code
        self.prefill_queue: deque[PrefillScript] = deque()
        self.offers: dict[str, OfferState] = {}
        self.offer_numbers = itertools.count(1)

    def script_for(self, request: RecordedRequest) -> Script:
        """Scripts are for generations; the worker's own routes always behave."""
        if request.path.startswith("/v1/") and request.method == "POST":
            return super().script_for(request)
        return Script()


class NativeConnection(FakeConnection):
    """A connection that knows the worker's own routes too."""

    def __init__(self, board: NativeBoard) -> None:
        super().__init__(board)
        self._native = board

    async def _answer(self, request: RecordedRequest, script: Script) -> None:
        board, path = self._native, request.path.partition("?")[0]
        if path == "/splitserve/profile":
            self._send_json(script, asdict(board.profile))
        elif path == "/splitserve/load":
            self._send_json(script, self._load())
        elif path.startswith(RELEASE_PREFIX):
            offer_id = path.removeprefix(RELEASE_PREFIX)
            known = board.offers.get(offer_id) in ("open", "ready")
            board.offers[offer_id] = "released"
            self._send_json(script, {"released": known})
        elif path.startswith(PREFILL_PREFIX):
            await self._prefill(request)
            return
        elif HANDOFF_HEADER in request.headers and board.handoff_code is not None:
            body = error_body("the pull failed", "server_error", board.handoff_code)
            self._send_json(replace(script, status=502), body)
        else:
            if HANDOFF_HEADER in request.headers:
                script = replace(script, headers={**_TRANSFERRED, **script.headers})
            await super()._answer(request, script)
            return
        request.outcome = "done"

    def _load(self) -> dict[str, object]:
        board, profile = self._native, self._native.profile
        return {
            "instance": profile.instance,
            "running": board.open_streams,
            "waiting": 0,
            "kv_used_tokens": 0,
            "kv_capacity_tokens": profile.kv_capacity_tokens,
            "offers": sum(state in ("open", "ready") for state in board.offers.values()),
            "prefill_tok_s": profile.prefill_tok_s,
            "decode_tok_s": profile.decode_tok_s,
        }

    async def _prefill(self, request: RecordedRequest) -> None:
        board = self._native
        script = board.prefill_queue.popleft() if board.prefill_queue else PrefillScript()
        if script.status >= 400:
            body = error_body(f"scripted {script.status}", "fake", script.code)
            self._send_json(Script(status=script.status), body)
            request.outcome = "done"
            return
        if script.stop_at == "before_offer":
            await self._stop(request, script)
            return
        headers = {"content-type": "application/x-ndjson", "transfer-encoding": "chunked"}
        self._transport.write(self._head(Script(), headers))
        if script.raw_line is not None:
            self._chunk(request, script.raw_line.encode() + b"\n")
            await self._stop(request, replace(script, silent=True))
            return
        offer_id = f"offer-{next(board.offer_numbers)}"
        board.offers[offer_id] = "open"
        self._chunk(request, _line(_offer(offer_id, script)))
        if script.stop_at == "after_offer":
            await self._stop(request, script)
            return
        if script.gate is not None:
            await script.gate.wait()
        board.offers[offer_id] = "failed" if script.second_line_error else "ready"
        self._chunk(request, _line(_last_line(script)))
        self._transport.write(b"0\r\n\r\n")
        request.outcome = "done"

    async def _stop(self, request: RecordedRequest, script: PrefillScript) -> None:
        if script.silent:
            await asyncio.Event().wait()
        request.outcome = "cut"
        self.close("rst")

    def _chunk(self, request: RecordedRequest, data: bytes) -> None:
        self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        request.chunks_sent += 1
        self._native.on_change()


_TRANSFERRED = {
    "x-splitserve-transfer-ms": str(TRANSFER_MS),
    "x-splitserve-transfer-bytes": str(TRANSFER_BYTES),
}


def _line(body: dict[str, object]) -> bytes:
    return json.dumps(body).encode() + b"\n"


def _offer(offer_id: str, script: PrefillScript) -> dict[str, object]:
    attributes = base64.urlsafe_b64encode(f'{{"offer_id": "{offer_id}"}}'.encode()).decode()
    return {
        "handoff_id": offer_id,
        "attributes": attributes,
        "prompt_tokens": script.prompt_tokens,
    }


def _last_line(script: PrefillScript) -> dict[str, object]:
    if script.second_line_error:
        return error_body("the prefill failed", "server_error", script.code)
    return {
        "prompt_tokens": script.prompt_tokens,
        "cached_tokens": script.cached_tokens,
        "prefill_ms": script.prefill_ms,
        "queue_ms": 0.0,
    }


class FakeNative(FakeOpenAI):
    """A native worker's HTTP side. `handoff_code` set: decode answers 502 with it to a hand-off."""

    def __init__(
        self,
        *,
        role: str = "auto",
        script: Script | None = None,
        queue: Sequence[Script] = (),
        prefill_queue: Sequence[PrefillScript] = (),
        models: tuple[str, ...] = ("m",),
        port: int = 0,
        handoff_code: str | None = None,
        record_limit: int = 1000,
    ) -> None:
        super().__init__(script=script, models=models, port=port, record_limit=record_limit)
        profile = NativeProfile(role, models)
        board = NativeBoard(script or Script(), profile, handoff_code, record_limit)
        board.queued.extend(queue)
        board.prefill_queue.extend(prefill_queue)
        board.on_change = self._wake
        self._board: NativeBoard = board

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: NativeConnection(self._board), self._host, self._port, backlog=BACKLOG
        )
        self._port = self._server.sockets[0].getsockname()[1]
        return self

    @property
    def profile(self) -> NativeProfile:
        """What this worker says it is; a new `instance` is a restart."""
        return self._board.profile

    @property
    def offers(self) -> dict[str, OfferState]:
        """Every hand-off it ever offered or was asked to release, and what became of it."""
        return self._board.offers

    def enqueue_prefill(self, *scripts: PrefillScript) -> None:
        """Scripts for the next prefill calls, one each."""
        self._board.prefill_queue.extend(scripts)

    def break_handoffs(self, code: str | None) -> None:
        """From now on answer 502 with `code` to every hand-off; None: take them again."""
        self._board.handoff_code = code

    def calls(self, prefix: str = "/v1/") -> list[RecordedRequest]:
        """The newest POST requests whose path begins with `prefix`, oldest first."""
        return [r for r in self.requests if r.method == "POST" and r.path.startswith(prefix)]
