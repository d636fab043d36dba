"""A worker under another name: requests carry the engine's, everybody else sees ours."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field, replace

import pytest

from router.backends.base import Backend, BackendCall, PrefillDone
from router.backends.renaming import RenamingBackend
from router.upstream import UpstreamResponse
from router.usage import TokenCounts
from splitserve.messages import Failure, Handoff, Role, WorkerSnapshot

HANDOFF = Handoff("h", "w", "c", "{}")
COUNTS = TokenCounts(5, 1, 2, exact=True)
FORM = (
    b'--b\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\n\x00\xff--b\r\n'
    b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\n%b\r\n--b--\r\n'
)


@dataclass
class Inner:
    """The engine, which knows the model as `org/own`."""

    worker_id: str = "w"
    models: tuple[str, ...] = ("org/own", "other")
    calls: list[BackendCall] = field(default_factory=list)
    handoffs: list[Handoff | None] = field(default_factory=list)
    known: list[WorkerSnapshot] = field(default_factory=list)

    async def probe(self) -> WorkerSnapshot:
        return WorkerSnapshot("w", Role.DECODE, "fake", self.models, max_running=3)

    async def load(self, known: WorkerSnapshot) -> WorkerSnapshot:
        self.known.append(known)
        return replace(known, running=7)

    async def prefill(self, call: BackendCall) -> AsyncGenerator[Handoff | PrefillDone, None]:
        self.calls.append(call)
        yield HANDOFF

    async def decode(self, call: BackendCall, handoff: Handoff | None) -> UpstreamResponse:
        self.calls.append(call)
        self.handoffs.append(handoff)
        raise ConnectionError

    async def release(self, handoff: Handoff, *, consumed: bool) -> None:
        self.handoffs.append(handoff if consumed else None)

    def recomputed(self, handoff: Handoff, counts: TokenCounts) -> int | None:
        return counts.prompt_tokens

    def failure_of(self, status: int, body: bytes) -> Failure | None:
        return Failure.HANDOFF if status == 502 else None


@pytest.fixture
def inner() -> Inner:
    return Inner()


@pytest.fixture
def backend(inner: Inner) -> RenamingBackend:
    known: Backend = inner
    return RenamingBackend(known, "public", "org/own")


def call(body: bytes, kind: bytes = b"application/json") -> BackendCall:
    headers = ((b"content-type", kind), (b"x-a", b"1"))
    return BackendCall(b"/v1/x", body, headers, "id", "tenant", batch=True)


async def test_snapshots_have_the_public_name(inner: Inner, backend: RenamingBackend) -> None:
    snapshot = await backend.probe()
    assert (snapshot.models, snapshot.max_running) == (("public",), 3)
    assert (await backend.load(snapshot)).models == ("public",)
    assert (await backend.load(snapshot)).running == 7
    assert inner.known[0].models == ("org/own",)


async def test_an_engine_without_the_model_is_refused(inner: Inner) -> None:
    backend = RenamingBackend(inner, "public", "missing")
    with pytest.raises(ValueError, match="it serves org/own, other, not missing"):
        await backend.probe()
    inner.models = ()
    with pytest.raises(ValueError, match="it serves no model, not missing"):
        await backend.probe()


async def test_both_legs_carry_the_engines_name(inner: Inner, backend: RenamingBackend) -> None:
    sent = call(b'{ "x":1.0,"model" : "public","messages":[{"model":"public"}] }')
    assert [news async for news in backend.prefill(sent)] == [HANDOFF]
    with pytest.raises(ConnectionError):
        await backend.decode(sent, HANDOFF)
    assert inner.handoffs == [HANDOFF]
    for got in inner.calls:
        assert got.body == b'{"x":1.0,"model":"org/own","messages":[{"model":"public"}]}'
        assert replace(got, body=sent.body) == sent


@pytest.mark.parametrize(
    "kind", [b"multipart/form-data; boundary=b", b'Multipart/Form-Data;charset=x; BOUNDARY="b"']
)
async def test_a_forms_model_is_replaced_in_place(
    inner: Inner, backend: RenamingBackend, kind: bytes
) -> None:
    with pytest.raises(ConnectionError):
        await backend.decode(call(FORM.replace(b"%b", b"public"), kind), None)
    assert inner.calls[0].body == FORM.replace(b"%b", b"org/own")


async def test_the_rest_is_the_engines(inner: Inner, backend: RenamingBackend) -> None:
    assert backend.worker_id == "w"
    assert backend.recomputed(HANDOFF, COUNTS) == 5
    assert backend.failure_of(502, b"") is Failure.HANDOFF
    assert backend.failure_of(400, b"") is None
    await asyncio.wait_for(backend.release(HANDOFF, consumed=True), 1)
    assert inner.handoffs == [HANDOFF]
