"""A client that leaves, in every phase: both legs end within a second and nothing stays booked."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from router.testing.connection import RecordedRequest
from router.testing.fake_native import FakeNative, PrefillScript
from router.testing.fake_openai import FakeOpenAI
from router.testing.loopback_router import LoopbackRouter, Split
from router.testing.raw_client import RawClient
from router.testing.script import Script
from splitserve import messages as m

CHAT = "/v1/chat/completions"
WITHIN_S = 1.0
PLAIN = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}
STREAM = {**PLAIN, "stream": True}
BODIES = pytest.mark.parametrize("body", [PLAIN, STREAM], ids=["plain", "stream"])

HOLD_OFFER = PrefillScript(stop_at="before_offer", silent=True)
HOLD_PREFILL = PrefillScript(stop_at="after_offer", silent=True)
HOLD_HEAD = Script(silent=True)
HOLD_BODY = Script(first_chunk_delay_s=3600)
HOLD_STREAM = Script(silent_after_chunks=2)


def generations(fake: FakeOpenAI) -> list[RecordedRequest]:
    return [r for r in fake.requests if r.method == "POST" and "/release/" not in r.path]


async def all_gone(*fakes: FakeOpenAI) -> None:
    for fake in fakes:
        await fake.until(
            lambda f: all(call.outcome != "open" for call in generations(f)), timeout_s=WITHIN_S
        )


def ask(client: RawClient, body: dict[str, object]) -> None:
    client.post(CHAT, json.dumps(body).encode())


@BODIES
async def test_before_the_offer(split: Split, body: dict[str, object]) -> None:
    split.prefill.enqueue_prefill(HOLD_OFFER)
    async with RawClient(split.router.url) as client:
        ask(client, body)
        await split.prefill.until(lambda f: len(generations(f)) == 1)
    await all_gone(split.prefill)
    await split.router.idle()
    assert generations(split.prefill)[0].outcome == "client_gone"
    assert generations(split.decode) == []
    assert split.prefill.offers == {}
    assert split.router.latest()["actual"]["finish"] == "cancelled"


@BODIES
@pytest.mark.parametrize("held", [HOLD_HEAD, HOLD_BODY], ids=["no head", "head, no byte"])
@pytest.mark.parametrize("prefill", [HOLD_PREFILL, PrefillScript()], ids=["prefilling", "done"])
async def test_before_the_first_byte(
    split: Split, body: dict[str, object], held: Script, prefill: PrefillScript
) -> None:
    split.prefill.enqueue_prefill(prefill)
    split.decode.enqueue(held)
    async with RawClient(split.router.url) as client:
        ask(client, body)
        await split.decode.until(lambda f: len(generations(f)) == 1)
        if prefill is not HOLD_PREFILL:
            await split.router.until(
                lambda: any(isinstance(event, m.PrefillFinished) for event, _ in split.router.steps)
            )
    await all_gone(split.prefill, split.decode)
    await split.router.idle()
    assert generations(split.decode)[0].outcome == "client_gone"
    outcome = "client_gone" if prefill is HOLD_PREFILL else "done"
    assert generations(split.prefill)[0].outcome == outcome
    assert split.prefill.offers == {"offer-1": "released"}


async def test_in_the_stream(split: Split) -> None:
    split.prefill.enqueue_prefill(HOLD_PREFILL)
    split.decode.enqueue(HOLD_STREAM)
    async with RawClient(split.router.url) as client:
        ask(client, STREAM)
        await client.until(b"w1 ")
    await all_gone(split.prefill, split.decode)
    await split.router.idle()
    assert generations(split.decode)[0].outcome == "client_gone"
    assert generations(split.prefill)[0].outcome == "client_gone"
    # The first token was there, so the KV was read: no release is sent.
    assert [r.consumed for r in split.commands(m.ReleaseKV)] == [True]
    assert split.prefill.offers == {"offer-1": "open"}


@pytest.fixture
async def engine() -> AsyncIterator[FakeOpenAI]:
    async with FakeOpenAI() as fake:
        yield fake


@BODIES
@pytest.mark.parametrize("held", [HOLD_HEAD, HOLD_BODY], ids=["no head", "head, no byte"])
async def test_whole_request_before_the_first_byte(
    engine: FakeOpenAI, body: dict[str, object], held: Script
) -> None:
    async with LoopbackRouter({"url": engine.url}) as router:
        engine.enqueue(held)
        async with RawClient(router.url) as client:
            ask(client, body)
            await engine.until(lambda f: len(generations(f)) == 1)
        await all_gone(engine)
        assert generations(engine)[0].outcome == "client_gone"
        await router.idle()


async def test_whole_request_in_the_stream(engine: FakeOpenAI) -> None:
    async with LoopbackRouter({"url": engine.url}) as router:
        engine.enqueue(HOLD_STREAM)
        async with RawClient(router.url) as client:
            ask(client, STREAM)
            await client.until(b"w1 ")
        await all_gone(engine)
        await router.idle()


async def test_in_the_queue() -> None:
    async with FakeNative(role="aggregated") as fake:
        fake.profile.max_running = 1
        fake.enqueue(HOLD_HEAD)
        async with LoopbackRouter({"url": fake.url}) as router:
            async with RawClient(router.url) as first, RawClient(router.url) as second:
                ask(first, PLAIN)
                await fake.until(lambda f: len(generations(f)) == 1)
                ask(second, PLAIN)
                await router.until(lambda: router.app.scheduler.queued == 1)
                second.leave()
                await router.until(lambda: router.app.scheduler.queued == 0, WITHIN_S)
                assert generations(fake)[0].outcome == "open"
            await all_gone(fake)
            await router.idle()
            assert len(generations(fake)) == 1


async def test_in_the_upload(engine: FakeOpenAI) -> None:
    async with LoopbackRouter({"url": engine.url}) as router:
        async with RawClient(router.url) as client:
            client.send(
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
                b"content-length: 1000\r\nexpect: 100-continue\r\n\r\n"
            )
            await client.until(b"100 Continue")  # so the router is reading the body
            client.send(b'{"model"')
        await asyncio.wait(router.server_state.tasks, timeout=WITHIN_S)
        assert router.server_state.tasks == set()
        await router.idle()
        assert generations(engine) == []
        assert len(router.app.dispatcher.records) == 0


async def test_client_that_stops_reading_and_leaves(engine: FakeOpenAI) -> None:
    endless = {**STREAM, "max_tokens": 1_000_000}
    engine.set_script(Script(chunk_bytes=16_384))
    async with LoopbackRouter({"url": engine.url}) as router:
        async with RawClient(router.url, receive_buffer_bytes=1 << 16) as client:
            ask(client, endless)
            await client.until(b"w0 ")
            await engine.until(lambda f: f.blocked_writers == 1)
        await all_gone(engine)
        await router.idle()


async def test_client_that_reads_slowly_gets_all(engine: FakeOpenAI) -> None:
    engine.set_script(Script(chunk_bytes=65_536, chunks=400))
    async with LoopbackRouter({"url": engine.url}) as router:
        async with RawClient(router.url, receive_buffer_bytes=1 << 16) as client:
            ask(client, STREAM)
            await engine.until(lambda f: f.blocked_writers == 1)
            answer = await client.answer()
        assert answer.complete
        assert answer.body.count(b"data: ") == 401
        await router.idle()


async def test_cancelled_right_after_the_answer_was_sent(engine: FakeOpenAI) -> None:
    """The client leaves in the same moment as the answer ends; whoever is first, all is tidy."""
    async with LoopbackRouter({"url": engine.url}) as router:
        for _ in range(50):
            async with RawClient(router.url) as client:
                ask(client, STREAM)
                await client.until(b"w8 ")
        await router.idle()
        ends = {r.finish for r in router.app.dispatcher.records.latest(50)}
        assert ends <= {"done", "cancelled"}
