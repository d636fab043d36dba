"""Whether a server is vLLM, and what it is taken for."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from router.backends.base import (
    BackendCall,
    EngineRefused,
    Target,
    Unusable,
    WorkerOptions,
    WorkerRestarted,
)
from router.backends.vllm import VllmBackend
from router.errors import HandoffExpired, HandoffFailed, Malformed
from router.origin import parse_origin
from router.sections import KvTransfer
from router.testing.fake_openai import FakeOpenAI
from router.testing.fake_vllm import ConnectorName, FakeVllm
from router.testing.script import Script
from router.testing.vllm_kv import Fabric
from router.upstream import HttpUpstream
from router.usage import TokenCounts
from router.wire import Deadlines
from splitserve.messages import Failure, Handoff, Role

CALL = BackendCall(
    b"/v1/completions",
    b'{"model":"m","prompt":"one two three four five six seven","max_tokens":2}',
    [(b"content-type", b"application/json"), (b"x-request-id", b"r")],
    "r",
)


@contextlib.asynccontextmanager
async def backend_of(fake: FakeOpenAI, **options: Any) -> AsyncIterator[VllmBackend]:
    """A backend for a fake, not probed."""
    upstream = HttpUpstream()
    role = options.pop("role", Role.AUTO)
    clock = options.pop("clock", None)
    target = Target("w", parse_origin(fake.url), role, WorkerOptions(**options))
    more = {} if clock is None else {"clock": clock}
    yield VllmBackend(target, upstream, Deadlines(), **more)
    upstream.close()


def settings(fake: FakeVllm) -> KvTransfer:
    return KvTransfer.model_validate(fake.settings)


async def test_what_it_tells() -> None:
    async with FakeVllm("nixl-pull", models=("a", "b")) as fake:
        fake.facts.kv_cache_memory_bytes = str(16 * 4096 * 1000)
        async with backend_of(fake, kv=settings(fake), role=Role.PREFILL) as backend:
            snapshot = await backend.probe()
        assert (snapshot.engine, snapshot.role) == ("vllm", Role.PREFILL)
        assert snapshot.models == ("a", "b")
        assert snapshot.connector == "vllm-nixl-pull"
        assert snapshot.pairing_key == "vllm=0.32.0;root=org/m;kv_cache_dtype=auto"
        assert snapshot.kv_capacity_tokens == 16 * 4096
        assert snapshot.kv_bytes_per_token == 1000
        assert snapshot.max_context_tokens == 4096
        assert any("0.32.0" in note for note in snapshot.notes)


async def test_without_a_connector_it_serves_whole_requests() -> None:
    async with FakeVllm() as fake, backend_of(fake) as backend:
        snapshot = await backend.probe()
        assert (snapshot.role, snapshot.connector) == (Role.AGGREGATED, "")
    async with FakeVllm("nixl-pull") as fake, backend_of(fake) as backend:
        snapshot = await backend.probe()
        assert any("write kv into its entry" in note for note in snapshot.notes)


async def test_a_connector_that_is_not_there_is_told_of() -> None:
    async with FakeVllm() as fake:
        async with backend_of(fake, kv=KvTransfer(connector="nixl-pull")) as backend:
            with pytest.raises(Unusable, match="runs without NIXL; start it with --kv-transfer"):
                await backend.probe()


async def test_one_that_keeps_no_metrics_is_known_by_its_models() -> None:
    async with FakeVllm("nixl-pull") as fake:
        fake.facts.has_metrics = False
        async with backend_of(fake, kv=settings(fake)) as backend:
            snapshot = await backend.probe()
            assert snapshot.kv_capacity_tokens == 0
            assert await backend.load(snapshot) == snapshot


@pytest.mark.parametrize("fault", [Script(status=500), Script(raw="HTTP/1.1 200 OK\r\n\r\n")])
async def test_other_servers_are_not_vllm(fault: Script) -> None:
    async with FakeOpenAI(script=fault) as fake, backend_of(fake) as backend:
        with pytest.raises(ValueError, match="GET /version"):
            await backend.probe()


async def test_load_reads_gauges() -> None:
    async with FakeVllm() as fake, backend_of(fake) as backend:
        known = await backend.probe()
        fake.facts.running, fake.facts.waiting, fake.facts.kv_usage = 3, 2, 0.5
        loaded = await backend.load(known)
        assert loaded == replace(known, running=3, waiting=2, kv_used_tokens=32768)
        fake.facts.started_s = 5.0
        with pytest.raises(WorkerRestarted):
            await backend.load(known)


@contextlib.asynccontextmanager
async def two(
    connector: ConnectorName, clock: Any = None
) -> AsyncIterator[tuple[FakeVllm, VllmBackend, FakeVllm, VllmBackend]]:
    fabric = Fabric()
    async with FakeVllm(connector, fabric) as p, FakeVllm(connector, fabric) as d:
        async with (
            backend_of(p, kv=settings(p), clock=clock) as first,
            backend_of(d, kv=settings(d), clock=clock) as second,
        ):
            await first.probe()
            await second.probe()
            yield p, first, d, second


async def handoff_of(backend: VllmBackend, call: BackendCall = CALL) -> Handoff:
    found = [each async for each in backend.prefill(call)]
    assert isinstance(found[0], Handoff)
    return found[0]


@pytest.mark.parametrize("connector", ["nixl-pull", "nixl-push"])
async def test_no_two_attempts_share_an_id(connector: ConnectorName) -> None:
    async with two(connector) as (p, first, _, _):
        ids = {(await handoff_of(first)).handoff_id for _ in range(3)}
        assert len(ids) == 3
        assert {call.headers["x-request-id"] for call in p.calls()} == ids


async def test_prefill_counts_come_from_the_engine() -> None:
    async with two("nixl-pull") as (p, first, _, _):
        p.board.spoil = lambda offer: {**offer, "remote_prefill_cached_tokens": 3}
        found = [each async for each in first.prefill(CALL)]
        done = found[-1]
        assert not isinstance(done, Handoff)
        assert (done.prompt_tokens, done.cached_tokens) == (8, 3)
        assert done.prefill_s > 0


async def test_an_expired_claim_is_not_sent() -> None:
    now = [0.0]
    async with two("nixl-pull", lambda: now[0]) as (_, first, d, second):
        handoff = await handoff_of(first)
        now[0] = 20.5
        with pytest.raises(HandoffExpired, match=r"20\.5 s old and its lease is 30 s"):
            await second.decode(CALL, handoff)
        assert d.calls() == []
        now[0] = 19.5
        async with await second.decode(CALL, handoff) as response:
            assert response.status == 200


async def test_a_decode_leg_that_fails_is_over_for_the_counters_too() -> None:
    async with two("nixl-pull") as (p, first, d, second):
        known = await second.probe()
        for script in (Script(status=503), Script(raw="no HTTP")):
            d.enqueue(script)
            with pytest.raises((HandoffFailed, Malformed)):
                await second.decode(CALL, await handoff_of(first))
        told: list[int] = []
        second._watch._target = replace(second._watch._target, on_recompute=told.append)
        await second.load(known)
        p.board.spoil = lambda offer: {**offer, "remote_port": 9}  # computed again, silently
        handoff = await handoff_of(first)
        async with await second.decode(CALL, handoff) as response:
            await response.read(1 << 20)
        assert second.recomputed(handoff, TokenCounts(8, 0, 2, exact=True)) is None
        await second.load(known)
        await second.load(known)
        assert told == [8]


async def test_a_stream_that_begins_with_an_error_is_a_failed_hand_off() -> None:
    async with two("nixl-pull") as (_, first, d, second):
        error = 'data: {"error":{"message":"Internal server error","code":500}}\n\n'
        head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
        d.enqueue(Script(raw=head + error))
        call = replace(CALL, body=CALL.body[:-1] + b',"stream":true}')
        with pytest.raises(HandoffFailed, match="Internal server error"):
            await second.decode(call, await handoff_of(first))


async def test_a_prefill_leg_that_is_refused_says_what_the_engine_said() -> None:
    async with two("nixl-pull") as (p, first, _, _):
        p.enqueue(Script(status=400))
        with pytest.raises(EngineRefused) as refused:
            await handoff_of(first)
        assert refused.value.status == 400
        assert first.failure_of(400, refused.value.body) is None


async def test_leaving_a_prefill_leg_closes_it() -> None:
    async with two("nixl-pull") as (p, first, _, _):
        p.board.prefill_gate = asyncio.Event()
        leg = asyncio.ensure_future(handoff_of(first))
        await p.until(lambda _: len(p.calls()) == 1)
        leg.cancel()
        await p.until(lambda _: p.calls()[0].outcome == "client_gone")


async def test_forms_are_passed_on_as_they_are() -> None:
    async with FakeVllm() as fake, backend_of(fake) as backend:
        await backend.probe()
        form = [(b"content-type", b"multipart/form-data; boundary=x"), *CALL.headers[1:]]
        call = replace(CALL, body=b"--x\r\n", headers=form, tenant="alice", batch=True)
        async with await backend.decode(call, None) as response:
            await response.read(1 << 20)
        assert fake.calls()[0].body == b"--x\r\n"


@pytest.mark.parametrize(
    "status,failure",
    [(400, None), (404, None), (422, None), (429, Failure.REFUSED), (500, Failure.REFUSED)],
)
async def test_errors(status: int, failure: Failure | None) -> None:
    async with FakeVllm() as fake, backend_of(fake) as backend:
        assert backend.failure_of(status, b'{"error":{"message":"no"}}') is failure


async def test_an_own_priority_that_is_refused_is_given_up() -> None:
    said = json.dumps({"error": {"message": "Priority scheduling is not enabled"}}).encode()
    async with FakeVllm() as fake, backend_of(fake) as backend:
        await backend.probe()
        assert backend.failure_of(400, said) is Failure.REFUSED
        assert backend.failure_of(400, said) is None  # the client's own, then
    async with FakeVllm() as fake, backend_of(fake) as backend:
        fake.facts.version = "0.9.1"
        await backend.probe()
        assert backend.failure_of(400, said) is None
