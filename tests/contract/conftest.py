"""What the contract is held against. A further engine is one more entry of `ENGINES`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

import pytest
import uvloop

from router.testing.connection import RecordedRequest
from router.testing.fake_native import FakeNative
from router.testing.fake_openai import FakeOpenAI
from router.testing.loopback_router import LoopbackRouter
from router.testing.script import Script

SAME_ID = Script(merge={"id": "same"})


@dataclass(frozen=True, slots=True)
class Served:
    """An engine, and the router in front of it.

    `plan` is what a chat must be served by. `engine_url` answers the same requests without the
    router. `received` gives what the engine was sent last; None for one that does not tell.
    """

    router: LoopbackRouter
    engine_url: str
    model: str
    plan: str
    received: Callable[[], RecordedRequest] | None


@contextlib.asynccontextmanager
async def plain_openai() -> AsyncIterator[Served]:
    async with FakeOpenAI(script=SAME_ID) as fake:
        async with LoopbackRouter({"url": fake.url, "name": "one"}) as router:
            yield Served(router, fake.url, "m", "aggregated", lambda: fake.requests[-1])


@contextlib.asynccontextmanager
async def native_whole() -> AsyncIterator[Served]:
    async with FakeNative(role="aggregated", script=SAME_ID) as fake:
        async with LoopbackRouter({"url": fake.url, "name": "one"}) as router:
            yield Served(router, fake.url, "m", "aggregated", lambda: fake.calls()[-1])


@contextlib.asynccontextmanager
async def native_split() -> AsyncIterator[Served]:
    async with FakeNative(role="prefill") as p, FakeNative(role="decode", script=SAME_ID) as d:
        workers = {"url": p.url, "name": "p"}, {"url": d.url, "name": "d"}
        async with LoopbackRouter(*workers) as router:
            yield Served(router, d.url, "m", "disaggregated", lambda: d.calls()[-1])


Adapter = Callable[[], AbstractAsyncContextManager[Served]]
ENGINES: dict[str, Adapter] = {
    "openai": plain_openai,
    "native whole": native_whole,
    "native split": native_split,
}


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The router runs on uvloop."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(params=ENGINES)
async def served(request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    async with ENGINES[request.param]() as engine:
        yield engine
        await engine.router.idle()
