"""A scripted SGLang server in one of its modes, and the strict protocol between two of them.

In a test::

    network = Rendezvous()
    async with FakeSglang("prefill", network) as p, FakeSglang("decode", network) as d:
        ...                                  # route to p.url and d.url

A request to either needs `bootstrap_host`, `bootstrap_port` and `bootstrap_room`, and is answered
once the partner is in the same room. What a decode or null server then answers is scripted as in
`FakeOpenAI`; a prefill server's scripts are its own (`enqueue`), never the request's `x-fake`.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Self

from router.testing.connection import (
    JSON_HEADERS,
    SSE_HEADERS,
    FakeConnection,
    RecordedRequest,
    Switchboard,
)
from router.testing.fake_openai import BACKLOG, FakeOpenAI
from router.testing.rendezvous import Layout, Rendezvous, Room, Side, TransferFailed
from router.testing.replies import DONE_EVENT, Asked, read_request
from router.testing.script import Script

Mode = Literal["null", "prefill", "decode"]
FAKE_PEER = "2.2.2.2"
GENERATIONS = ("/v1/chat/completions", "/v1/completions", "/generate")
NO_ROOM = "Invalid request: Disaggregated request received without bootstrap room id"


@dataclass(slots=True)
class ServerArgs:
    """What `/server_info` says; change fields before the router asks."""

    disaggregation_mode: str
    model_path: str = "org/m"
    served_model_name: str = "m"
    version: str = "0.5.23"
    disaggregation_bootstrap_port: int = 8998
    disaggregation_transfer_backend: str = "nixl"
    disaggregation_decode_allocation_policy: str = "early"
    page_tokens: int = 64
    kv_cache_dtype: str = "auto"
    tp_ranks: int = 1
    context_length: int | None = None
    max_running_requests: int | None = 32
    max_total_num_tokens: int = 100_000

    def told(self) -> dict[str, object]:
        """The document, under the server's own names."""
        known = asdict(self)
        known["page_size"], known["tp_size"] = known.pop("page_tokens"), known.pop("tp_ranks")
        return {**known, "internal_states": []}


class SglangBoard(Switchboard):
    """What all connections of one fake SGLang server share."""

    def __init__(
        self, script: Script, args: ServerArgs, network: Rendezvous, record_limit: int
    ) -> None:
        super().__init__(script, (args.served_model_name,), None, record_limit)
        self.args = args
        self.network = network
        self.metrics: str | None = None
        self.alone_status = 200
        self.gate: asyncio.Event | None = None
        self.failing = ""

    def script_for(self, request: RecordedRequest) -> Script:
        """Scripts are for generations, and those of a prefill server its own."""
        if request.method != "POST" or request.path == "/generate":
            return Script()
        if self.args.disaggregation_mode == "prefill":
            return self.queued.popleft() if self.queued else self.script
        return super().script_for(request)

    @property
    def layout(self) -> Layout:
        return Layout(self.args.page_tokens, self.args.kv_cache_dtype)


class SglangConnection(FakeConnection):
    """A connection that knows SGLang's own routes, and waits for the partner of a request."""

    def __init__(self, board: SglangBoard) -> None:
        super().__init__(board)
        self._sglang = board

    async def _answer(self, request: RecordedRequest, script: Script) -> None:
        board, path = self._sglang, request.path.partition("?")[0]
        if path == "/server_info":
            self._send_json(script, board.args.told())
        elif path == "/v1/models":
            card = {"id": board.args.served_model_name, "object": "model", "max_model_len": 4096}
            self._send_json(script, {"object": "list", "data": [card]})
        elif path == "/metrics" and board.metrics is not None:
            self._send(200, {"content-type": "text/plain"}, board.metrics.encode())
        elif path in GENERATIONS and script.status < 400:
            await self._meet_and_answer(request, script)
            return
        else:
            await super()._answer(request, script)
            return
        request.outcome = "done"

    async def _meet_and_answer(self, request: RecordedRequest, script: Script) -> None:
        board, body = self._sglang, json.loads(request.body)
        if board.args.disaggregation_mode != "null" and body.get("bootstrap_room") is None:
            self._fail(request, 400, "BadRequestError", NO_ROOM)
            return
        try:
            async with self._partner(body):
                if request.path == "/generate":
                    self._send_json(replace(script, status=board.alone_status), {"text": "w0"})
                    request.outcome = "done"
                    return
                if board.args.disaggregation_mode == "prefill":
                    script = replace(script, chunks=1, usage=True)
                await super()._answer(request, script)
        except TransferFailed as error:
            self._fail(request, 500, "InternalServerError", str(error))

    @contextlib.asynccontextmanager
    async def _partner(self, body: dict[str, Any]) -> AsyncIterator[None]:
        """Be together with the other side of this request until the answer has gone out."""
        board, mode = self._sglang, self._sglang.args.disaggregation_mode
        if mode == "null" or body.get("bootstrap_host") == FAKE_PEER:
            yield
            return
        side: Side = "prefill" if mode == "prefill" else "decode"
        address = (body["bootstrap_host"], body["bootstrap_port"])
        with board.network.enter(side, address, _rooms(body), board.layout) as rooms:
            board.on_change()
            for room in rooms:
                await self._move(side, room)
            yield

    async def _move(self, side: Side, room: Room) -> None:
        board = self._sglang
        if side == "decode":
            await board.network.wait(room.moved, room)
            return
        await board.network.wait(room.complete, room)
        if board.gate is not None:
            await board.gate.wait()
        room.broken = board.failing
        room.moved.set()
        if room.broken:
            raise TransferFailed(room.broken)

    def _asked(self, request: RecordedRequest) -> Asked:
        """Count the prompt's own bytes, so that the fields of a room change nothing."""
        asked = read_request(request.path, request.body)
        body = json.loads(request.body)
        prompt = json.dumps(body.get("messages") or body.get("prompt") or "")
        return replace(asked, prompt_tokens=max(1, len(prompt) // 4))

    def _fail(self, request: RecordedRequest, status: int, kind: str, message: str) -> None:
        """SGLang's flat error; a stream that fails later than its checks is a 200 with an event."""
        error = {
            "object": "error",
            "message": message,
            "type": kind,
            "param": None,
            "code": status,
        }
        if status >= 500 and json.loads(request.body).get("stream"):
            event = b"data: " + json.dumps({"error": error}).encode() + b"\n\n"
            self._send(200, SSE_HEADERS, event + DONE_EVENT)
        else:
            self._send(status, JSON_HEADERS, json.dumps(error).encode())
        request.outcome = "done"

    def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
        head = self._head(Script(status=status), {**headers, "content-length": str(len(body))})
        self._transport.write(head + body)


def _rooms(body: dict[str, Any]) -> list[int]:
    """One room for each prompt: a lone number is counted up."""
    first, prompt = body["bootstrap_room"], body.get("prompt")
    prompts = 1
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompts = len(prompt)
    return [first + number for number in range(prompts)]


class FakeSglang(FakeOpenAI):
    """A server in `mode`; those of one `network` reach each other."""

    def __init__(
        self,
        mode: Mode,
        network: Rendezvous | None = None,
        *,
        script: Script | None = None,
        queue: Sequence[Script] = (),
        record_limit: int = 1000,
    ) -> None:
        super().__init__(script=script, record_limit=record_limit)
        network = network or Rendezvous()
        board = SglangBoard(script or Script(), ServerArgs(mode), network, record_limit)
        board.queued.extend(queue)
        board.on_change = self._wake
        self._board: SglangBoard = board

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: SglangConnection(self._board), self._host, self._port, backlog=BACKLOG
        )
        self._port = self._server.sockets[0].getsockname()[1]
        board = self._board
        if board.args.disaggregation_mode == "prefill":
            address = (self._host, board.args.disaggregation_bootstrap_port)
            board.network.servers[address] = board.layout
        return self

    @property
    def args(self) -> ServerArgs:
        """What this server says it was started with."""
        return self._board.args

    @property
    def network(self) -> Rendezvous:
        """Where its requests meet their partners."""
        return self._board.network

    def hold_transfers(self, gate: asyncio.Event | None) -> None:
        """A prefill server sends no KV before this is set; None: at once."""
        self._board.gate = gate

    def break_transfers(self, message: str) -> None:
        """From now on every transfer ends with this error on both sides; "" for none."""
        self._board.failing = message

    def show_metrics(self, text: str | None) -> None:
        """What `/metrics` says; None: it was not started with --enable-metrics."""
        self._board.metrics = text

    def answer_alone(self, status: int) -> None:
        """The status of a request against the built-in fake peer."""
        self._board.alone_status = status

    def calls(self) -> list[RecordedRequest]:
        """The newest requests for a generation, oldest first."""
        return [r for r in self.requests if r.method == "POST" and r.path.startswith("/v1/")]
