"""What the router asks of an engine, whatever it is."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from router.origin import Origin
from router.sections import KvTransfer
from router.upstream import UpstreamResponse
from router.usage import TokenCounts
from router.wire import Headers
from splitserve.messages import Failure, Handoff, Role, WorkerSnapshot


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """What the configuration says of a worker beyond its address; "" where it says nothing.

    `model` is the only model to serve of it, `engine_model` the engine's own name for that one.
    `max_running` bounds its requests at once; 0: what the engine says, or is known for.
    `headers` go with every call (its API key).
    """

    engine: str = ""
    model: str = ""
    engine_model: str = ""
    max_running: int = 0
    headers: Headers = ()
    kv: KvTransfer | None = None
    kv_events: str = ""
    courier: Origin | None = None
    courier_key: str = ""


@dataclass(frozen=True, slots=True)
class Target:
    """One worker to speak to: what a dialect is made of, with a client and its deadlines.

    `on_recompute` is told of prompt tokens handed over and computed again, where that shows only
    in the worker's counters and not in an answer.
    """

    worker_id: str
    origin: Origin
    role: Role
    options: WorkerOptions = field(default_factory=WorkerOptions)
    on_recompute: Callable[[int], None] = lambda tokens: None


@dataclass(frozen=True, slots=True)
class BackendCall:
    """One client request as it goes to a worker: route, body bytes untouched, headers passed on.

    `request_id` is the router's own, which no client can guess. `batch`: it may wait for others.
    `fresh`: nothing of its prompt may come from a cache, where KV that was handed over lies too.
    `decode_connector`: how the worker moves KV that is to go on where this prefill ends.
    """

    path: bytes
    body: bytes
    headers: Headers = ()
    request_id: str = ""
    tenant: str = ""
    batch: bool = False
    decode_connector: str = ""
    fresh: bool = False


@dataclass(frozen=True, slots=True)
class PrefillDone:
    """The prefill worker's own account of a finished prefill."""

    prompt_tokens: int
    cached_tokens: int
    prefill_s: float


class EngineRefused(Exception):
    """The engine answered a prefill with an error. Status, headers and body are the engine's."""

    def __init__(self, status: int, headers: Headers, body: bytes) -> None:
        super().__init__(f"HTTP {status}")
        self.status = status
        self.headers = headers
        self.body = body


class _Said(msgspec.Struct):
    message: str = ""


class _Envelope(msgspec.Struct):
    error: _Said | None = None
    message: str = ""  # SGLang's errors have no envelope


def quoted_error(body: bytes) -> str:
    """Return ": " and the message of an OpenAI error body, in one short line; "" without one."""
    try:
        said = msgspec.json.decode(body, type=_Envelope)
    except msgspec.DecodeError:
        return ""
    message = said.message if said.error is None else said.error.message
    return f": {' '.join(message.split())[:200]}" if message else ""


class Unusable(ValueError):
    """It is this dialect's engine, and cannot be used as it is: no other dialect is to be tried."""


class WorkerRestarted(ValueError):
    """Another process answers at the worker's address."""


class Backend(Protocol):
    """One worker, spoken to in its engine's dialect.

    All calls raise router.errors.UpstreamError when the worker cannot be talked to. Cancelling a
    call closes its connection, which is how an engine learns that nobody waits any more.
    """

    worker_id: str

    async def probe(self) -> WorkerSnapshot:
        """Ask what the worker is. Raises also ValueError when it is not this engine: Unusable
        when it is, and cannot be used.
        """
        ...

    async def load(self, known: WorkerSnapshot) -> WorkerSnapshot:
        """Ask how busy it is; returns `known` with fresh figures."""
        ...

    def prefill(self, call: BackendCall) -> AsyncGenerator[Handoff | PrefillDone, None]:
        """Prefill for another: first the hand-off, then the account. Raises EngineRefused."""
        ...

    async def decode(self, call: BackendCall, handoff: Handoff | None) -> UpstreamResponse:
        """Answer a request, with the KV that `handoff` claims, or from nothing (aggregated)."""
        ...

    async def release(self, handoff: Handoff, *, consumed: bool) -> None:
        """End a hand-off. `consumed`: a decode worker read it."""
        ...

    def recomputed(self, handoff: Handoff, counts: TokenCounts) -> int | None:
        """Return how many handed-over prompt tokens this decode worker computed again.

        Engines answer 200 after silently computing everything anew. None: this answer proves
        nothing either way.
        """
        ...

    def failure_of(self, status: int, body: bytes) -> Failure | None:
        """Say what an error answer means; None: it is the client's own mistake, pass it on."""
        ...
