"""A scripted vLLM server with one KV connector, and the strict protocol between two of them.

In a test::

    fabric = Fabric()
    async with FakeVllm("nixl-pull", fabric) as p, FakeVllm("nixl-pull", fabric) as d:
        ...                                  # route to p.url and d.url

What it answers is scripted as in `FakeOpenAI`; `kv_transfer_params` do what they do in vLLM 0.32.
Where KV was read after its lease the text is another than it should be, with a status of 200. An
engine that dies takes the server with it (`dead`).
"""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from router.testing.connection import FakeConnection, RecordedRequest, Switchboard
from router.testing.fake_openai import BACKLOG, FakeOpenAI
from router.testing.replies import Asked, error_body, read_request
from router.testing.script import Script
from router.testing.vllm_kv import EngineDied, Fabric, KvEngine, Prompt, TransferRefused

ConnectorName = Literal["", "nixl-pull", "nixl-push", "example", "lmcache"]
WRONG_TEXT_BYTES = 9
"""Texts of KV that was another's are filled up with dots to this size."""
_KEEPS_KV = b'"do_remote_decode":true'  # as the router writes it


@dataclass(slots=True)
class VllmFacts:
    """What the server says of itself; change fields before the router asks."""

    version: str = "0.32.0"
    root: str = "org/m"
    context_tokens: int = 4096
    block_tokens: int = 16
    blocks: int = 4096
    kv_cache_memory_bytes: str = "None"
    kv_usage: float = 0.25
    running: int = 0
    waiting: int = 0
    started_s: float = 1000.0
    has_metrics: bool = True


class VllmBoard(Switchboard):
    """What all connections of one fake vLLM server share."""

    def __init__(
        self,
        script: Script,
        connector: ConnectorName,
        kv: KvEngine,
        models: tuple[str, ...],
        record_limit: int,
    ) -> None:
        super().__init__(script, models, None, record_limit)
        self.connector = connector
        self.kv = kv
        self.facts = VllmFacts()
        self.prefill_gate: asyncio.Event | None = None
        self.spoil: Callable[[dict[str, object]], dict[str, object] | None] = lambda offer: offer
        self.on_death: Callable[[], None] = lambda: None
        self.refuses_priority = False

    def script_for(self, request: RecordedRequest) -> Script:
        """Scripts are for generations, and `x-fake` for the leg that answers."""
        if request.method != "POST":
            return Script()
        if self.connector and _KEEPS_KV in request.body:
            return self.queued.popleft() if self.queued else self.script
        return super().script_for(request)


class VllmConnection(FakeConnection):
    """A connection that knows vLLM's own routes, and what its connector makes of a request."""

    def __init__(self, board: VllmBoard) -> None:
        super().__init__(board)
        self._vllm = board

    async def _answer(self, request: RecordedRequest, script: Script) -> None:
        board, path = self._vllm, request.path.partition("?")[0]
        if path == "/version":
            self._send_json(script, {"version": board.facts.version})
        elif path == "/v1/models":
            self._send_json(
                script, {"object": "list", "data": [_card(board, m) for m in board.models]}
            )
        elif path == "/tokenize":
            tokens = _prompt(json.loads(request.body)).tokens
            self._send_json(script, {"count": tokens, "tokens": list(range(tokens))})
        elif path == "/metrics":
            self._send_text(metrics_text(board) if board.facts.has_metrics else "up 1.0\n")
        else:
            await super()._answer(request, script)
            return
        request.outcome = "done"

    async def _generate(self, request: RecordedRequest, script: Script) -> None:
        try:
            body = json.loads(request.body)
            _check(body, refuses_priority=self._vllm.refuses_priority)
            script = await self._moved(request, body, script)
        except ValueError as error:
            body = error_body(str(error), "BadRequestError", None)
            self._send_json(Script(status=400), body)
            request.outcome = "done"
        except TransferRefused:
            body = error_body("Internal server error", "InternalServerError", None)
            self._send_json(Script(status=500), body)
            request.outcome = "done"
        except EngineDied:
            self._vllm.on_death()
        else:
            await super()._generate(request, script)

    async def _moved(self, request: RecordedRequest, body: Any, script: Script) -> Script:
        """Let the connector do its part; returns the script with what it changes."""
        board, params = self._vllm, body.get("kv_transfer_params")
        kv, prompt = board.kv, _prompt(body)
        if "kv_transfer_params" in (body.get("vllm_xargs") or {}):
            raise EngineDied("AttributeError: 'str' object has no attribute 'get'")
        if board.connector == "example":
            found = kv.load_files(prompt, board.facts.block_tokens)
            kv.counters.external_kv_transfer += found
            kv.counters.local_compute += prompt.tokens - found
            if not found:
                kv.save_files(prompt, board.facts.block_tokens)
            return _with_ids(body, script, prompt)
        if not board.connector.startswith("nixl") or not params:
            kv.counters.local_compute += prompt.tokens
            return script
        request_id = request.headers.get("x-request-id", f"made-up-{request.number}")
        if params.get("do_remote_prefill"):
            return await self._decoded(request_id, params, prompt, script)
        kv.counters.local_compute += prompt.tokens
        if board.prefill_gate is not None:
            await board.prefill_gate.wait()
        offer = board.spoil(kv.keep(request_id, prompt))
        return replace(script, merge={**script.merge, "kv_transfer_params": offer})

    async def _decoded(
        self, request_id: str, params: dict[str, Any], prompt: Prompt, script: Script
    ) -> Script:
        board = self._vllm
        if board.connector == "nixl-push":
            await board.kv.register(request_id, params, prompt)
            return script
        right = await board.kv.pull(params, prompt)
        return script if right else replace(script, chunk_bytes=WRONG_TEXT_BYTES)

    def _asked(self, request: RecordedRequest) -> Asked:
        """Count the prompt alone, so that what the router adds changes nothing."""
        asked = read_request(request.path, request.body)
        return replace(asked, prompt_tokens=_prompt(json.loads(request.body)).tokens)

    def _send_text(self, text: str) -> None:
        body = text.encode()
        headers = {"content-type": "text/plain; version=0.0.4", "content-length": str(len(body))}
        self._transport.write(self._head(Script(), headers) + body)


def _check(body: Any, *, refuses_priority: bool) -> None:
    """Raise ValueError for what vLLM answers 400 to."""
    if not isinstance(body, dict):
        raise ValueError("the body must be a JSON object")
    if not isinstance(body.get("kv_transfer_params") or {}, dict):
        raise ValueError("kv_transfer_params: Input should be a valid dictionary")
    if body.get("stream_options") and not body.get("stream"):
        raise ValueError("Stream options can only be defined when `stream=True`.")
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    if limit is not None and (body.get("min_tokens") or 0) > limit:
        raise ValueError(f"min_tokens must be less than or equal to max_tokens={limit}.")
    if "cache_salt" in body and not (isinstance(body["cache_salt"], str) and body["cache_salt"]):
        raise ValueError("Parameter 'cache_salt' must be a non-empty string if provided.")
    if refuses_priority and body.get("priority"):
        raise ValueError("Got priority 10 but Priority scheduling is not enabled.")


def _prompt(body: dict[str, Any]) -> Prompt:
    given = body.get("messages") or body.get("prompt") or ""
    if isinstance(given, list) and given and isinstance(given[0], int):
        return Prompt(json.dumps(given), len(given))
    text = json.dumps(given)
    return Prompt(text, max(1, len(text) // 4))


def _with_ids(body: dict[str, Any], script: Script, prompt: Prompt) -> Script:
    if not body.get("return_token_ids"):
        return script
    given = json.loads(prompt.text)
    are_ids = isinstance(given, list) and isinstance(given[0], int)
    ids = given if are_ids else list(range(prompt.tokens))
    return replace(script, merge={**script.merge, "prompt_token_ids": ids})


def _card(board: VllmBoard, name: str) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "owned_by": "vllm",
        "root": board.facts.root,
        "parent": None,
        "max_model_len": board.facts.context_tokens,
    }


def metrics_text(board: VllmBoard) -> str:
    """The series of a vLLM server that matter here, and one that does not."""
    facts, counters = board.facts, board.kv.counters
    labels = 'engine="0",model_name="m"'
    cache = (
        f'block_size="{facts.block_tokens}",cache_dtype="auto",engine="0",'
        f'kv_cache_memory_bytes="{facts.kv_cache_memory_bytes}",num_gpu_blocks="{facts.blocks}"'
    )
    by_source = {
        "local_compute": counters.local_compute,
        "local_cache_hit": counters.local_cache_hit,
        "external_kv_transfer": counters.external_kv_transfer,
    }
    lines = [
        "# HELP vllm:num_requests_running Number of requests in model execution batches.",
        "# TYPE vllm:num_requests_running gauge",
        f"process_start_time_seconds {facts.started_s}",
        f"vllm:num_requests_running{{{labels}}} {facts.running}",
        f"vllm:num_requests_waiting{{{labels}}} {facts.waiting}",
        f'vllm:num_requests_waiting_by_reason{{{labels},reason="capacity"}} 7.0',
        f"vllm:kv_cache_usage_perc{{{labels}}} {facts.kv_usage}",
        f"vllm:cache_config_info{{{cache}}} 1.0",
    ]
    if board.connector.startswith("nixl"):
        late = "vllm:nixl_num_notifications_after_expiry_total"
        lines.append(f"vllm:nixl_num_kv_expired_reqs_total{{{labels}}} {counters.expired}")
        lines.append(f"{late}{{{labels}}} {counters.late_reads}")
    name = "vllm:prompt_tokens_by_source_total"
    lines += [f'{name}{{{labels},source="{s}"}} {n}.0' for s, n in by_source.items()]
    return "\n".join(lines) + "\n"


class FakeVllm(FakeOpenAI):
    """A server with `connector`; those of one `fabric` reach each other.

    `lease_s` runs on the event loop's clock, or on `clock`. `recomputes`: what a pull that fails
    leads to (`kv_load_failure_policy`).
    """

    def __init__(
        self,
        connector: ConnectorName = "",
        fabric: Fabric | None = None,
        *,
        engine_id: str = "",
        script: Script | None = None,
        models: tuple[str, ...] = ("m",),
        lease_s: float = 30.0,
        clock: Callable[[], float] | None = None,
        recomputes: bool = True,
        record_limit: int = 1000,
    ) -> None:
        super().__init__(script=script, models=models, record_limit=record_limit)
        fabric = fabric or Fabric()
        number = len(fabric.engines)
        kv = KvEngine(
            engine_id or f"engine-{number}",
            "127.0.0.1",
            15600 + number,
            lease_s,
            clock or (lambda: asyncio.get_running_loop().time()),
            fabric,
            recomputes,
        )
        fabric.engines[kv.engine_id] = kv
        kv.on_change = self._wake
        self.kv = kv
        self._vllm = VllmBoard(script or Script(), connector, kv, models, record_limit)
        self._vllm.on_change = self._wake
        self._vllm.on_death = self._die
        self._board: VllmBoard = self._vllm
        self.dead = False

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: VllmConnection(self._vllm), self._host, self._port, backlog=BACKLOG
        )
        self._port = self._server.sockets[0].getsockname()[1]
        return self

    def _die(self) -> None:
        assert self._server is not None
        self.dead = True
        self._server.close()
        self.drop_all("rst")

    @property
    def facts(self) -> VllmFacts:
        """What it says of itself; another `started_s` is a restart."""
        return self._vllm.facts

    @property
    def board(self) -> VllmBoard:
        """Its gates and faults."""
        return self._vllm

    @property
    def settings(self) -> dict[str, object]:
        """The `kv` of this worker's entry in a configuration."""
        known: dict[str, object] = {"connector": self._vllm.connector, "lease_s": self.kv.lease_s}
        if self._vllm.connector == "nixl-push":
            known["engine_id"] = self.kv.engine_id
            known["side_channel"] = f"{self.kv.host}:{self.kv.port}"
        if self._vllm.connector == "example":
            known["folder"] = "/shared"
        return known

    def calls(self) -> list[RecordedRequest]:
        """The newest generations, oldest first."""
        return [r for r in self.requests if r.method == "POST"]
