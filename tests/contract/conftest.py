"""What the contract is held against. A further engine is one more entry of `ENGINES`."""

from __future__ import annotations

import asyncio
import contextlib
import re
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path

import pytest
import uvloop

from router.testing.contract import Served
from router.testing.fake_llama import FakeLlama
from router.testing.fake_native import FakeNative
from router.testing.fake_openai import FakeOpenAI
from router.testing.fake_sglang import FakeSglang
from router.testing.fake_vllm import ConnectorName, FakeVllm
from router.testing.loopback_router import LoopbackRouter
from router.testing.rendezvous import Rendezvous
from router.testing.script import Script
from router.testing.vllm_kv import Fabric
from workers.courier.testing.served_courier import ServedCourier

SAME_ID = Script(merge={"id": "same"})


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


@contextlib.asynccontextmanager
async def sglang_split() -> AsyncIterator[Served]:
    network = Rendezvous()
    async with (
        FakeSglang("prefill", network) as p,
        FakeSglang("decode", network, script=SAME_ID) as d,
        FakeSglang("null", script=SAME_ID) as whole,
    ):
        workers = {"url": p.url, "name": "p"}, {"url": d.url, "name": "d"}
        async with LoopbackRouter(*workers) as router:
            room = frozenset({"bootstrap_host", "bootstrap_port", "bootstrap_room"})
            yield Served(router, whole.url, "m", "disaggregated", lambda: d.calls()[-1], added=room)


@contextlib.asynccontextmanager
async def vllm_whole() -> AsyncIterator[Served]:
    async with FakeVllm(script=SAME_ID) as fake:
        async with LoopbackRouter({"url": fake.url, "name": "one"}) as router:
            yield Served(router, fake.url, "m", "aggregated", lambda: fake.calls()[-1])


def vllm_split(connector: ConnectorName) -> AbstractAsyncContextManager[Served]:
    @contextlib.asynccontextmanager
    async def served() -> AsyncIterator[Served]:
        fabric = Fabric()
        async with (
            FakeVllm(connector, fabric) as p,
            FakeVllm(connector, fabric, script=SAME_ID) as d,
        ):
            workers = [
                {"url": worker.url, "name": name, "role": role, "kv": worker.settings}
                for worker, name, role in ((p, "p", "prefill"), (d, "d", "decode"))
            ]
            async with LoopbackRouter(*workers) as router:
                added = frozenset({"kv_transfer_params"})
                plan = "disaggregated"
                yield Served(router, d.url, "m", plan, lambda: d.calls()[-1], added=added)

    return served()


# What a llama-server says of a prompt depends on those before it in the slot.
REMEMBERED = re.compile(rb'(?<="cached_tokens": )\d+')
LLAMA_SCRIPT = Script(merge={"id": "same"}, drop=("timings",))
LONG = 1_000_000


@contextlib.asynccontextmanager
async def llama_whole() -> AsyncIterator[Served]:
    async with FakeLlama(script=LLAMA_SCRIPT, context_tokens=LONG) as fake:
        async with LoopbackRouter({"url": fake.url, "name": "one"}) as router:
            plan, last = "aggregated", lambda: fake.calls()[-1]
            yield Served(router, fake.url, "m", plan, last, anew=(REMEMBERED,))


@contextlib.asynccontextmanager
async def llama_split() -> AsyncIterator[Served]:
    with tempfile.TemporaryDirectory() as made:
        places = Path(made, "p"), Path(made, "d")
        with ServedCourier(places[0]) as pc, ServedCourier(places[1]) as dc:
            async with (
                FakeLlama(folder=places[0], context_tokens=LONG) as p,
                FakeLlama(folder=places[1], script=LLAMA_SCRIPT, context_tokens=LONG) as d,
            ):
                workers = (
                    {"url": p.url, "name": "p", "role": "prefill", "courier": pc.url},
                    {"url": d.url, "name": "d", "role": "decode", "courier": dc.url},
                )
                async with LoopbackRouter(*workers) as router:
                    yield Served(
                        router,
                        d.url,
                        "m",
                        "disaggregated",
                        lambda: d.calls()[-1],
                        added=frozenset({"id_slot", "cache_prompt"}),
                        anew=(REMEMBERED,),
                    )


Adapter = Callable[[], AbstractAsyncContextManager[Served]]
ENGINES: dict[str, Adapter] = {
    "openai": plain_openai,
    "native whole": native_whole,
    "native split": native_split,
    "sglang split": sglang_split,
    "vllm whole": vllm_whole,
    "vllm nixl pull": partial(vllm_split, "nixl-pull"),
    "vllm nixl push": partial(vllm_split, "nixl-push"),
    "llama whole": llama_whole,
    "llama split": llama_split,
}


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The router runs on uvloop."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(params=ENGINES)
async def served(request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    async with ENGINES[request.param]() as engine:
        yield engine
        await engine.router.idle()
