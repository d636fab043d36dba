"""Workers that join, leave, restart, drain and change roles under a running router."""

from __future__ import annotations

import asyncio
import json

import pytest

from router.testing.fake_native import FakeNative, PrefillScript
from router.testing.fake_openai import FakeOpenAI
from router.testing.loopback_router import LoopbackRouter, Split
from router.testing.raw_client import RawClient
from router.testing.script import Script
from splitserve import messages as m

CHAT = "/v1/chat/completions"
PLAIN = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
STREAM = {**PLAIN, "stream": True}


def state(router: LoopbackRouter, worker_id: str) -> bool:
    return router.app.registry.members[worker_id].alive


def lost(router: LoopbackRouter) -> list[m.WorkerLost]:
    return [event for event, _ in router.steps if isinstance(event, m.WorkerLost)]


# --- restart, loss, return ------------------------------------------------------------------------


async def test_restart_behind_the_same_address(split: Split) -> None:
    router = split.router
    split.decode.profile.instance = "second"
    split.decode.profile.pairing_key = "weights=other"
    router.app.registry.poke("d")
    await router.until(lambda: lost(router) != [] and state(router, "d"))
    assert lost(router) == [m.WorkerLost("d", "the worker was restarted")]
    answer = await router.client.post(CHAT, json=PLAIN)
    assert answer.headers["x-splitserve-plan"] == "aggregated"  # its KV differs now
    await router.idle()


async def test_request_on_a_restarted_worker_is_run_again(split: Split) -> None:
    router = split.router
    split.decode.enqueue(Script(silent=True))
    asked = asyncio.ensure_future(router.client.post(CHAT, json=STREAM))
    await split.decode.until(lambda _: len(split.decode.calls()) == 1)
    split.decode.profile.instance = "second"
    router.app.registry.poke("d")
    answer = await asked
    assert answer.status_code == 200
    record = await router.record(answer)
    assert record["failures"] == ["attempt 1, ended because a worker was lost"]
    await router.idle()
    assert split.decode.calls()[0].outcome == "client_gone"
    assert split.prefill.offers["offer-1"] == "released"


@pytest.mark.parametrize("body", [PLAIN, STREAM], ids=["plain", "stream"])
@pytest.mark.parametrize("held", [Script(silent=True), Script(first_chunk_delay_s=3600)])
async def test_whole_request_on_a_removed_worker_moves_at_once(
    body: dict[str, object], held: Script
) -> None:
    async with FakeOpenAI() as one, FakeOpenAI() as two:
        workers = {"url": one.url, "name": "a"}, {"url": two.url, "name": "b"}
        async with LoopbackRouter(*workers) as router:
            one.enqueue(held)
            asked = asyncio.ensure_future(router.client.post(CHAT, json=body))
            await one.until(lambda f: f.requests[-1].method == "POST")
            assert (await router.client.delete("/admin/workers/a")).json() == {"removed": True}
            answer = await asked
            assert answer.status_code == 200
            assert answer.headers["x-splitserve-workers"] == "aggregated=b"
            await router.idle()
            await one.until(lambda f: f.requests[-1].outcome == "client_gone")
            assert router.in_use(one.url) == 0


async def test_stream_on_a_removed_worker_ends_with_an_error_event() -> None:
    async with FakeOpenAI() as engine:
        async with LoopbackRouter({"url": engine.url, "name": "a"}) as router:
            engine.enqueue(Script(silent_after_chunks=1))
            async with RawClient(router.url) as client:
                client.post(CHAT, json.dumps(STREAM).encode())
                await client.until(b"w0 ")
                await router.client.delete("/admin/workers/a")
                answer = await client.answer()
            assert answer.complete
            assert b"worker_broke" in answer.body
            await router.idle()


ROLE_ONLY = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}


async def test_stream_whose_worker_is_lost_after_the_role_but_before_a_token() -> None:
    """The scheduler knows of no token and would try again; the client has seen bytes."""
    async with FakeOpenAI() as one, FakeOpenAI() as two:
        workers = {"url": one.url, "name": "a"}, {"url": two.url, "name": "b"}
        async with LoopbackRouter(*workers) as router:
            one.enqueue(Script(merge=ROLE_ONLY, silent_after_chunks=1))
            async with RawClient(router.url) as client:
                client.post(CHAT, json.dumps(STREAM).encode())
                await client.until(b"assistant")
                await router.client.delete("/admin/workers/a")
                answer = await client.answer()
            assert answer.complete
            assert answer.body.count(b"data: ") == 2
            assert b"worker_broke" in answer.body
            assert router.latest()["actual"]["ttft_ms"] is None
            await router.idle()
            assert [r for r in two.requests if r.method == "POST"] == []


async def test_worker_that_comes_back_serves_again() -> None:
    async with FakeOpenAI() as engine:
        port = int(engine.url.rpartition(":")[2])
        router = LoopbackRouter({"url": engine.url, "name": "e"})
        await router.__aenter__()
    try:
        assert (await router.client.get("/ready")).status_code == 200
        for number in range(3):
            router.app.registry.poke("e")
            await router.until(lambda n=number: router.app.registry.members["e"].misses > n)  # type: ignore[misc]
        assert lost(router) != []
        unready = await router.client.get("/ready")
        assert unready.status_code == 503
        assert unready.json()["models_without_worker"] == ["m"]
        assert "cannot connect" in unready.json()["workers"]["e"]
        async with FakeOpenAI(port=port):
            router.app.registry.poke("e")
            await router.until(lambda: state(router, "e"))
            assert (await router.client.get("/ready")).status_code == 200
            assert (await router.client.post(CHAT, json=PLAIN)).status_code == 200
            await router.idle()
    finally:
        await router.__aexit__(None, None, None)


# --- what an operator does ------------------------------------------------------------------------


async def test_ready_follows_the_models_of_the_configuration() -> None:
    async with FakeOpenAI(models=("a",)) as engine:
        spec = {"workers": [{"url": engine.url}]}
        models = {"a": spec, "b": {"workers": [{"url": "http://127.0.0.1:9"}]}}
        async with LoopbackRouter(models=models, wait=False) as router:
            await router.until(lambda: any(w.alive for w in router.app.registry.members.values()))
            answer = await router.client.get("/ready")
            assert answer.status_code == 503
            assert answer.json()["models_without_worker"] == ["b"]


async def test_no_worker_is_not_ready() -> None:
    async with LoopbackRouter() as router:
        assert (await router.client.get("/health")).status_code == 200
        assert (await router.client.get("/ready")).status_code == 503


async def test_drained_worker_gets_nothing_new_and_ends_what_it_has() -> None:
    async with FakeOpenAI() as one, FakeOpenAI() as two:
        workers = {"url": one.url, "name": "a"}, {"url": two.url, "name": "b"}
        async with LoopbackRouter(*workers) as router:
            one.enqueue(Script(silent_after_chunks=1))
            async with RawClient(router.url) as client:
                client.post(CHAT, json.dumps(STREAM).encode())
                await client.until(b"w0 ")
                answer = await router.client.patch("/admin/workers/a", json={"drain": True})
                assert answer.json()["state"] == "draining"
                for _ in range(3):
                    served = await router.client.post(CHAT, json=PLAIN)
                    assert served.headers["x-splitserve-workers"] == "aggregated=b"
                assert one.open_streams == 1
            await router.client.patch("/admin/workers/b", json={"drain": True})
            assert (await router.client.get("/ready")).status_code == 503
            await router.client.patch("/admin/workers/a", json={"drain": False})
            served = await router.client.post(CHAT, json=PLAIN)
            assert served.headers["x-splitserve-workers"] == "aggregated=a"
            await router.idle()


async def test_role_change_is_obeyed_and_survives_a_poll_under_way(split: Split) -> None:
    router = split.router
    answer = await router.client.post(CHAT, json=PLAIN)
    assert answer.headers["x-splitserve-plan"] == "disaggregated"
    reports = len(router.steps)
    router.app.registry.poke("p")  # the poll is under way when the role changes
    changed = await router.client.patch("/admin/workers/p", json={"role": "aggregated"})
    assert changed.json()["role"] == "aggregated"
    await router.until(lambda: len(router.steps) >= reports + 2)
    shown = (await router.client.get("/admin/workers")).json()["workers"]
    assert {w["id"]: w["role"] for w in shown} == {"p": "aggregated", "d": "decode"}
    answer = await router.client.post(CHAT, json=PLAIN)
    assert answer.headers["x-splitserve-workers"] == "aggregated=p"
    await router.idle()


async def test_worker_is_added_and_removed() -> None:
    async with FakeOpenAI() as one, FakeNative(models=("n",)) as two:
        async with LoopbackRouter({"url": one.url}) as router:
            wish = {"url": two.url + "/v1", "name": "new"}
            answer = await router.client.post("/admin/workers", json=wish)
            assert answer.status_code == 201
            assert answer.json()["url"] == two.url
            await router.until(lambda: state(router, "new"))
            listed = (await router.client.get("/v1/models")).json()["data"]
            assert [card["id"] for card in listed] == ["m", "n"]
            served = await router.client.post(CHAT, json={**PLAIN, "model": "n"})
            assert served.headers["x-splitserve-workers"] == "aggregated=new"
            await router.client.delete("/admin/workers/new")
            served = await router.client.post(CHAT, json={**PLAIN, "model": "n"})
            assert served.status_code == 503
            assert (await router.client.get("/ready")).status_code == 200
            await two.until(lambda f: f.open_connections == 0)
            again = await router.client.post("/admin/workers", json=wish)
            assert again.status_code == 201
            await router.until(lambda: state(router, "new"))
            await router.idle()


async def test_removed_while_it_is_polled_stays_removed() -> None:
    async with FakeOpenAI() as engine:
        async with LoopbackRouter({"url": engine.url, "name": "e"}) as router:
            router.app.registry.poke("e")
            await router.client.delete("/admin/workers/e")
            await router.client.get("/health")
            assert router.app.scheduler.ledger.workers == {}
            assert (await router.client.delete("/admin/workers/e")).status_code == 404


@pytest.mark.parametrize(
    "wish,word",
    [
        ({"url": "ftp://x"}, "http or https"),
        ({"url": ""}, "host"),
        ({"url": "http://x:99999"}, "worker URL"),
        ({"url": "http://127.0.0.1:9", "name": "e"}, "there already"),
        ({"url": "http://127.0.0.1:9", "name": "a\r\nset-cookie: x"}, "name"),
        ({"url": "http://127.0.0.1:9", "name": "a,b=c"}, "name"),
        ({"url": "http://127.0.0.1:9", "role": "boss"}, "role"),
        ({"url": "http://127.0.0.1:9", "extra": 1}, "extra"),
        ({}, "url"),
    ],
)
async def test_bad_worker_is_refused(wish: dict[str, object], word: str) -> None:
    async with FakeOpenAI() as engine:
        async with LoopbackRouter({"url": engine.url, "name": "e"}) as router:
            answer = await router.client.post("/admin/workers", json=wish)
            assert answer.status_code == 400
            assert word in answer.json()["error"]["message"]
            assert list(router.app.registry.members) == ["e"]


async def test_prefill_of_an_attempt_that_ended_is_not_left_running() -> None:
    async with FakeNative(role="prefill") as one, FakeNative(role="prefill") as two:
        async with FakeNative(role="decode") as d:
            workers = [{"url": f.url, "name": n} for f, n in ((one, "a"), (two, "b"), (d, "d"))]
            async with LoopbackRouter(*workers) as router:
                one.enqueue_prefill(PrefillScript(stop_at="before_offer", silent=True))
                asked = asyncio.ensure_future(router.client.post(CHAT, json=PLAIN))
                await one.until(lambda _: len(one.calls("/splitserve/")) == 1)
                await router.client.delete("/admin/workers/a")
                answer = await asked
                assert answer.headers["x-splitserve-workers"] == "prefill=b,decode=d"
                await one.until(lambda _: one.calls("/splitserve/")[0].outcome == "client_gone")
                await router.idle()
