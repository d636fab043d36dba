"""The end of the router: streams may end, what does not end is cut, nothing stays."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import uvicorn

from router.app import RouterApp, build_server
from router.settings import build
from router.testing.fake_native import FakeNative, PrefillScript
from router.testing.fake_openai import FakeOpenAI
from router.testing.loopback_router import LoopbackRouter
from router.testing.raw_client import RawClient
from router.testing.script import Script

CHAT = "/v1/chat/completions"
STREAM = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}


class Running:
    """The server as `splitserve route` runs it, stopped as a signal stops it."""

    def __init__(self, *fakes: FakeOpenAI, drain_s: float, **more: object) -> None:
        workers = [{"url": fake.url, "name": f"w{i}"} for i, fake in enumerate(fakes)]
        settings = build({"workers": workers, "limits": {"drain_s": drain_s}, **more})
        self.app = RouterApp(settings, {})
        self.server: uvicorn.Server = build_server(self.app)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    async def __aenter__(self) -> Running:
        self._joined = asyncio.Event()
        step = self.app.scheduler.step

        def watched(event: object, now_s: float) -> object:
            commands = step(event, now_s)  # type: ignore[arg-type]
            if all(member.alive for member in self.app.registry.members.values()):
                self._joined.set()
            return commands

        self.app.scheduler.step = watched  # type: ignore[method-assign,assignment]
        self.task = asyncio.create_task(self.server.serve([self._listener]))
        await asyncio.wait_for(self._joined.wait(), 5)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        self.server.should_exit = True
        await asyncio.wait_for(asyncio.shield(self.task), 10)


@pytest.fixture
async def engine() -> AsyncIterator[FakeOpenAI]:
    async with FakeOpenAI() as fake:
        yield fake


async def test_stream_may_end_while_the_router_stops(engine: FakeOpenAI) -> None:
    engine.set_script(Script(chunks=8, chunk_delay_s=0.05))
    async with Running(engine, drain_s=5) as running:
        async with RawClient(running.url) as client:
            client.post(CHAT, json.dumps(STREAM).encode())
            await client.until(b"w0 ")
            running.server.should_exit = True
            answer = await client.answer()
            assert answer.complete
            assert answer.body.endswith(b"[DONE]\n\n")
            assert answer.header("connection") is None  # its head was out before the end began
        await running.stop()
        assert running.app.scheduler.live == 0
    await engine.until(lambda fake: fake.open_connections == 0)


async def test_what_does_not_end_is_cut_and_tidied(tolerated: list[str]) -> None:
    tolerated += ["timeout graceful shutdown exceeded", "Exception in ASGI application"]
    async with FakeNative(role="prefill") as p, FakeNative(role="decode") as d:
        p.enqueue_prefill(PrefillScript(stop_at="after_offer", silent=True))
        d.enqueue(Script(silent=True))
        async with Running(p, d, drain_s=0.1) as running:
            async with RawClient(running.url) as client:
                client.post(CHAT, json.dumps(STREAM).encode())
                await d.until(lambda _: len(d.calls()) == 1)
                await running.stop()
            assert running.app.scheduler.live == 0
            assert running.app.dispatcher.live == 0
        for fake in (p, d):
            await fake.until(lambda f: f.open_connections == 0)
        assert p.offers == {"offer-1": "released"}
        assert d.calls()[0].outcome == "client_gone"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
async def test_full_disk_ends_the_log_and_not_the_service(
    engine: FakeOpenAI, tolerated: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    tolerated += ["the event log ends here", "the event log has no end"]
    engine.set_script(Script(chunks=1))
    async with LoopbackRouter({"url": engine.url}, event_log="/dev/full") as router:
        for _ in range(400):  # the log is written out in pieces of 64 KiB
            answer = await router.client.post(CHAT, json=STREAM)
            assert answer.content.endswith(b"[DONE]\n\n")
            if "the event log ends here" in caplog.text:
                break
        await router.client.post(CHAT, json=STREAM)
        await router.idle()
    assert caplog.text.count("the event log ends here") == 1
