"""A fake llama-server with slots that hold tokens, and files that hold slots.

In a test::

    async with FakeLlama(folder=tmp_path / "p") as p, FakeLlama(folder=tmp_path / "d") as d:
        ...                                  # route to p.url and d.url, a courier in each folder

What it answers on `/v1/...` is scripted as in `FakeOpenAI`, with llama.cpp's account of what was
cached; `wrong_answers` counts those that were made from KV of other tokens. As with a real one, a
file cut short ends it (`aborted`), and a save or restore is done even if nobody waits for it.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from router.testing.connection import FakeConnection, RecordedRequest, Switchboard
from router.testing.fake_openai import BACKLOG, FakeOpenAI
from router.testing.llama_slot import (
    CannotRestore,
    FakeSlot,
    ServerAborted,
    common,
    tokens_of,
)
from router.testing.replies import Asked, read_request
from router.testing.script import Script

GENERATIONS = ("/v1/chat/completions", "/v1/completions")


@dataclass(slots=True)
class LlamaFlags:
    """How it was started; change fields before the router asks. Without `folder` nothing is saved.

    `sees_images`: its template puts `marker` where a message has one; else they count as text.
    `clears_idle` is what the default flags do to a slot that nobody uses when a request begins,
    `reuses_restored` False what a model with sliding windows does without --swa-full.
    """

    folder: Path | None = None
    slots: int = 4
    context_tokens: int = 4096
    streams: int = 1
    metrics: bool = True
    clears_idle: bool = False
    reuses_restored: bool = True
    build: str = "b11434-fake"
    marker: str = "<__media_first__>"
    parameters: int = 1000
    sees_images: bool = False


class LlamaBoard(Switchboard):
    """What all connections of one fake share. `gates` hold up what is named: see `FakeLlama`."""

    def __init__(
        self, script: Script, models: tuple[str, ...], flags: LlamaFlags, record_limit: int
    ) -> None:
        super().__init__(script, models, None, record_limit)
        self.flags = flags
        self.slots = [FakeSlot(number) for number in range(flags.slots)]
        self.gates: dict[str, asyncio.Event] = {}
        self.held: dict[str, int] = {}
        self.actions: set[asyncio.Task[Any]] = set()
        self.aborted = False
        self.wrong_answers = 0
        self.not_owned = 0

    def script_for(self, request: RecordedRequest) -> Script:
        """Scripts are for generations; the server's own routes always behave."""
        if request.path in GENERATIONS:
            return super().script_for(request)
        return Script()

    async def pass_gate(self, name: str) -> None:
        """Wait where a test holds this up."""
        self.held[name] = self.held.get(name, 0) + 1
        self.on_change()
        if name in self.gates:
            await self.gates[name].wait()

    def begin(self, slot: FakeSlot) -> None:
        """A request has got its slot. Where room is short idle slots lose what they hold."""
        for other in self.slots:
            idle = other is not slot and not other.busy.locked()
            if idle and (self.flags.clears_idle or self.overfull()):
                other.clear()

    def overfull(self) -> bool:
        """Slots that share one pool hold more than fits into it."""
        held = sum(len(slot.ids) for slot in self.slots)
        return self.flags.streams == 1 and held > self.flags.context_tokens

    def choose(self, number: int, ids: list[int]) -> FakeSlot:
        """The slot that is asked for, wrapped around; -1: the free one that knows the most."""
        if number != -1:
            return self.slots[number % len(self.slots)]
        self.not_owned += 1
        free = [slot for slot in self.slots if not slot.busy.locked()] or self.slots
        return max(free, key=lambda slot: common(slot.ids, ids))


class LlamaConnection(FakeConnection):
    """A connection that knows the server's own routes too."""

    def __init__(self, board: LlamaBoard) -> None:
        super().__init__(board)
        self._llama = board
        self._timings: dict[str, float] = {}

    async def _answer(self, request: RecordedRequest, script: Script) -> None:
        board, path = self._llama, request.path.partition("?")[0]
        if path in GENERATIONS and script.status < 400:
            await self._in_slot(request, script)
            return
        body = json.loads(request.body) if request.method == "POST" and request.body else {}
        if path == "/props":
            self._send_json(script, _props(board.flags))
        elif path == "/v1/models":
            meta = {"n_params": board.flags.parameters, "n_vocab": 30_002, "size": 4096}
            cards = [{"id": name, "object": "model", "meta": meta} for name in board.models]
            self._send_json(script, {"object": "list", "data": cards})
        elif path == "/metrics":
            await board.pass_gate("gauges")
            self._send_metrics()
        elif path == "/slots":
            states = [{"id": s.number, "is_processing": s.busy.locked()} for s in board.slots]
            self._send_json(script, states)
        elif path == "/apply-template":
            self._template(script, body)
        elif path == "/tokenize":
            self._send_json(script, {"tokens": tokens_of(body["content"])})
        elif path == "/completion":
            await self._evaluate(script, body)
        elif path.startswith("/slots/"):
            await self._act(request, body)
        else:
            await super()._answer(request, script)
            return
        request.outcome = "done"

    def _template(self, script: Script, body: dict[str, Any]) -> None:
        try:
            prompt = _prompt(body)
            if self._llama.flags.sees_images and "image_url" in prompt:
                prompt += self._llama.flags.marker
            self._send_json(script, {"prompt": prompt})
        except ValueError as error:
            self._refuse(400, str(error), "invalid_request_error")

    async def _evaluate(self, script: Script, body: dict[str, Any]) -> None:
        board, ids = self._llama, body["prompt"]
        slot = board.choose(body.get("id_slot", -1), ids)
        async with slot.busy:
            board.begin(slot)
            await board.pass_gate("evaluate")
            timings = self._fill(slot, ids)
        self._send_json(script, {"timings": {**timings, "predicted_n": 1}})

    def _fill(self, slot: FakeSlot, ids: list[int]) -> dict[str, float]:
        board = self._llama
        if slot.restored and not board.flags.reuses_restored:
            slot.clear()
        cached, right = slot.fill(ids)
        board.wrong_answers += not right
        fresh = len(ids) - cached
        return {"cache_n": cached, "prompt_n": fresh, "prompt_ms": float(fresh)}

    async def _in_slot(self, request: RecordedRequest, script: Script) -> None:
        board = self._llama
        try:
            body = json.loads(request.body)
            ids = _ids(body)
            choices = read_request(request.path, request.body).choices
        except (ValueError, TypeError, AttributeError) as error:
            self._refuse(400, str(error), "invalid_request_error")
            request.outcome = "done"
            return
        if len(ids) > board.flags.context_tokens:
            self._refuse(400, f"{len(ids)} tokens are too many", "exceed_context_size_error")
            request.outcome = "done"
            return
        slot = board.choose(body.get("id_slot", -1), ids)
        async with slot.busy:
            board.begin(slot)
            self._timings = self._fill(slot, ids)
            others = [each for each in board.slots if not each.busy.locked()]
            for other in others[: choices - 1]:
                other.fill(ids)
            await super()._answer(request, script)

    def _asked(self, request: RecordedRequest) -> Asked:
        asked = read_request(request.path, request.body)
        timings = self._timings
        tokens = int(timings["cache_n"] + timings["prompt_n"])
        return replace(asked, prompt_tokens=tokens, timings=timings)

    async def _act(self, request: RecordedRequest, body: dict[str, Any]) -> None:
        """Save, restore or erase: done to the end, whether or not the client waits."""
        board = self._llama
        path, _, action = request.path.partition("?action=")
        if board.flags.folder is None:
            said = "This server does not support slots action. Start it with `--slot-save-path`"
            self._refuse(501, said, "not_supported_error")
            return
        name = body.get("filename", "x")
        if "/" in name or ".." in name:
            self._refuse(400, "Invalid filename", "invalid_request_error")
            return
        slot = board.choose(int(path.rpartition("/")[2]), [])
        acting = asyncio.ensure_future(self._do(action, slot, board.flags.folder / name))
        board.actions.add(acting)
        acting.add_done_callback(board.actions.discard)
        try:
            answer = await asyncio.shield(acting)
        except CannotRestore:
            said = "Unable to restore slot: No available space in KV cache or invalid file"
            self._refuse(400, said, "invalid_request_error")
        except ServerAborted:
            board.aborted = True
            for connection in list(board.connections):
                connection.close("rst")
        else:
            self._send_json(Script(), {"id_slot": slot.number, **answer})

    async def _do(self, action: str, slot: FakeSlot, path: Path) -> dict[str, object]:
        board = self._llama
        async with slot.busy:
            await board.pass_gate(action)
            streams = board.flags.streams
            if action == "save":
                written = slot.write(path, streams)
                return {"n_saved": len(slot.ids), "n_written": written}
            if action == "restore":
                read = slot.read(path, streams)
                if board.overfull():
                    slot.clear()
                    raise CannotRestore
                return {"n_restored": len(slot.ids), "n_read": read}
            erased = len(slot.ids)
            slot.clear()
            return {"n_erased": erased}

    def _send_metrics(self) -> None:
        board = self._llama
        if not board.flags.metrics:
            self._refuse(501, "Start it with `--metrics`", "not_supported_error")
            return
        busy = sum(slot.busy.locked() for slot in board.slots)
        lines = [f"llamacpp:requests_processing {busy}", "llamacpp:requests_deferred 0"]
        data = "\n".join(lines).encode() + b"\n"
        headers = {"content-type": "text/plain", "content-length": str(len(data))}
        self._transport.write(self._head(Script(), headers) + data)

    def _refuse(self, status: int, message: str, kind: str) -> None:
        error = {"code": status, "message": message, "type": kind}
        self._send_json(Script(status=status), {"error": error})


def _props(flags: LlamaFlags) -> dict[str, object]:
    return {
        "default_generation_settings": {"n_ctx": flags.context_tokens},
        "total_slots": flags.slots,
        "model_path": "/models/m.gguf",
        "build_info": flags.build,
        "media_marker": flags.marker,
    }


def _prompt(body: dict[str, Any]) -> str:
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        raise ValueError("Expected 'messages' to be an array of objects")
    turns = [f"< {each.get('role')} > {each.get('content')}" for each in messages]
    return " ".join((*turns, "< assistant >"))


def _ids(body: dict[str, Any]) -> list[int]:
    prompt = body.get("prompt")
    if prompt is None:
        return tokens_of(_prompt(body))
    if isinstance(prompt, list) and all(isinstance(each, int) for each in prompt):
        return list(prompt)
    return tokens_of(" ".join(map(str, prompt)) if isinstance(prompt, list) else str(prompt))


class FakeLlama(FakeOpenAI):
    """A llama-server. `flags` are fields of `LlamaFlags`."""

    def __init__(
        self,
        *,
        script: Script | None = None,
        queue: Sequence[Script] = (),
        models: tuple[str, ...] = ("m",),
        record_limit: int = 1000,
        **flags: Any,
    ) -> None:
        super().__init__(script=script, models=models, record_limit=record_limit)
        board = LlamaBoard(script or Script(), models, LlamaFlags(**flags), record_limit)
        board.queued.extend(queue)
        board.on_change = self._wake
        self._board: LlamaBoard = board
        if board.flags.folder is not None:
            board.flags.folder.mkdir(parents=True, exist_ok=True)

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: LlamaConnection(self._board), self._host, self._port, backlog=BACKLOG
        )
        self._port = self._server.sockets[0].getsockname()[1]
        return self

    @property
    def flags(self) -> LlamaFlags:
        """How it was started; a new `marker` is a restart."""
        return self._board.flags

    @property
    def slots(self) -> list[FakeSlot]:
        """What each slot holds."""
        return self._board.slots

    @property
    def busy(self) -> int:
        """Slots that compute, are saved or restored, or answer."""
        return sum(slot.busy.locked() for slot in self._board.slots)

    @property
    def aborted(self) -> bool:
        """It was given a file that ends a real server."""
        return self._board.aborted

    @property
    def wrong_answers(self) -> int:
        """Prompts that were taken for cached although the KV was of other tokens."""
        return self._board.wrong_answers

    @property
    def not_owned(self) -> int:
        """Requests that left the choice of a slot to the server."""
        return self._board.not_owned

    def hold(self, what: str) -> asyncio.Event:
        """Hold up what is named until the event is set.

        One of "evaluate", "save", "restore", "erase" and "gauges", which waits for steps too.
        """
        self._board.held.pop(what, None)
        gate = self._board.gates[what] = asyncio.Event()
        return gate

    def held(self, what: str) -> int:
        """How many have come to where they are held up."""
        return self._board.held.get(what, 0)

    def calls(self, prefix: str = "/v1/") -> list[RecordedRequest]:
        """The newest POST requests whose path begins with `prefix`, oldest first."""
        return [r for r in self.requests if r.method == "POST" and r.path.startswith(prefix)]
