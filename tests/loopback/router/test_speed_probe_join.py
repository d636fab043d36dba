"""A worker that does not tell how fast it is gets measured before it gets traffic."""

from __future__ import annotations

import asyncio

import pytest

from router.testing.fake_native import FakeNative
from router.testing.fake_openai import FakeOpenAI
from router.testing.loopback_router import LoopbackRouter
from router.testing.script import Script
from splitserve.messages import WorkerSnapshot

PACED = Script(first_chunk_delay_s=0.002, chunk_delay_s=0.002)


def snapshot(router: LoopbackRouter) -> WorkerSnapshot:
    found = router.app.registry.members["w"].snapshot
    assert found is not None
    return found


async def test_it_joins_with_its_speeds() -> None:
    async with FakeOpenAI(script=PACED) as fake:
        worker = {"url": fake.url, "name": "w"}
        async with LoopbackRouter(worker, probe_speeds=True) as router:
            known = snapshot(router)
            assert known.prefill_tok_s > 0
            assert 1 < known.decode_tok_s <= 500  # its tokens come 2 ms apart
            sent = [r for r in fake.requests if r.method == "POST"]
            assert len(sent) == 3
            assert len({r.headers["x-request-id"] for r in sent}) == 3
            model = router.app.scheduler.ledger.workers["w"].model
            alone_s = model.decode_step_s(1, 0)
            assert alone_s == pytest.approx(1 / known.decode_tok_s, rel=0.5)


async def test_it_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with FakeOpenAI(script=PACED) as fake:
        worker = {"url": fake.url, "name": "w"}
        async with LoopbackRouter(worker, probe_speeds=True) as router:
            before = snapshot(router).prefill_tok_s
            member = router.app.registry.members["w"]
            router.app.registry._lose(member, "for a while")
            router.app.registry.poke("w")
            await router.until(lambda: member.alive)
            assert snapshot(router).prefill_tok_s == before
            assert len([r for r in fake.requests if r.method == "POST"]) == 3


@pytest.mark.parametrize(
    "script, why",
    [
        (Script(status=400), "HTTP 400: scripted 400"),
        (Script(chunks=0), "HTTP 200 and no token in its stream"),
        (Script(raw="gone"), "no valid HTTP/1.1"),
    ],
)
async def test_what_cannot_be_measured_joins_with_a_note(script: Script, why: str) -> None:
    async with FakeOpenAI(queue=[script] * 6) as fake:
        worker = {"url": fake.url, "name": "w"}
        async with LoopbackRouter(worker, probe_speeds=True) as router:
            known = snapshot(router)
            assert known.prefill_tok_s == 0
            assert known.notes[-1].startswith("its speed could not be measured: ")
            assert why in known.notes[-1]


async def test_a_worker_that_hangs_joins_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.registry.SPEED_PROBE_S", 0.05)
    async with FakeOpenAI(queue=[Script(silent=True)]) as fake:
        worker = {"url": fake.url, "name": "w"}
        async with LoopbackRouter(worker, probe_speeds=True) as router:
            assert snapshot(router).notes[-1].endswith("it took too long")
            await fake.until(lambda f: f.requests[-1].outcome == "client_gone")


async def test_of_several_models_none_is_measured_unless_one_is_named() -> None:
    async with FakeOpenAI(models=("a", "b")) as fake:
        worker = {"url": fake.url, "name": "w"}
        async with LoopbackRouter(worker, probe_speeds=True) as router:
            assert snapshot(router).notes[-1].startswith("its speed is not measured")
            assert [r for r in fake.requests if r.method == "POST"] == []
        async with LoopbackRouter({**worker, "model": "b"}, probe_speeds=True) as router:
            assert snapshot(router).prefill_tok_s > 0
            sent = [r.json() for r in fake.requests if r.method == "POST"]
            assert all(isinstance(each, dict) and each["model"] == "b" for each in sent)


async def test_a_worker_that_tells_its_speed_is_not_asked() -> None:
    async with FakeNative(role="aggregated") as fake:
        worker = {"url": fake.url, "name": "w"}
        async with LoopbackRouter(worker, probe_speeds=True) as router:
            assert snapshot(router).prefill_tok_s == fake.profile.prefill_tok_s
            assert fake.calls() == []


async def test_stopping_while_it_is_measured() -> None:
    async with FakeOpenAI(queue=[Script(silent=True)]) as fake:
        worker = {"url": fake.url, "name": "w"}
        async with LoopbackRouter(worker, wait=False, probe_speeds=True):
            await fake.until(lambda f: bool(f.requests) and f.requests[-1].method == "POST")
        await asyncio.wait_for(fake.until(lambda f: f.open_connections == 0), 5)
