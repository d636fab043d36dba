"""Tenants over real sockets: budgets are kept, weights reach the scheduler."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest

from router.testing.fake_openai import FakeOpenAI
from router.testing.loopback_router import LoopbackRouter
from router.testing.raw_client import RawClient
from router.testing.script import Script
from splitserve import messages as m

CHAT = "/v1/chat/completions"
TENANTS = [
    {"name": "alice", "key_env": "ALICE", "tokens_per_minute": 200, "weight": 3},
    {"name": "bob", "key_env": "BOB"},
]
ENVIRON = {"ALICE": "key-a", "BOB": "key-b", "ADMIN": "key-admin"}
ALICE = {"authorization": "Bearer key-a"}
BOB = {"authorization": "Bearer key-b"}
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}


def asking(output_tokens: int) -> dict[str, object]:
    return {**BODY, "max_tokens": output_tokens}


@pytest.fixture
async def engine() -> AsyncIterator[FakeOpenAI]:
    async with FakeOpenAI() as fake:
        yield fake


@pytest.fixture
async def router(engine: FakeOpenAI) -> AsyncIterator[LoopbackRouter]:
    worker = {"url": engine.url, "name": "e"}
    admin = {"key_env": "ADMIN"}
    async with LoopbackRouter(worker, environ=ENVIRON, tenants=TENANTS, admin=admin) as running:
        yield running


async def test_a_tenant_over_its_budget_is_told_when_to_come_back(
    router: LoopbackRouter, engine: FakeOpenAI
) -> None:
    first = await router.client.post(CHAT, json=asking(400), headers=ALICE)
    assert first.status_code == 200
    answer = await router.client.post(CHAT, json=BODY, headers=ALICE)
    assert answer.status_code == 429
    error = answer.json()["error"]
    assert (error["code"], error["type"]) == ("budget_used", "rate_limit_error")
    assert "tenant alice has used its budget of 200 tokens per minute" in error["message"]
    assert 60 < int(answer.headers["retry-after"]) < 100  # over 200 tokens of debt
    assert (await router.client.post(CHAT, json=BODY, headers=BOB)).status_code == 200
    await router.idle()
    assert len([r for r in engine.requests if r.method == "POST"]) == 2


async def test_a_stream_that_is_left_is_charged_for_what_was_said(
    router: LoopbackRouter, engine: FakeOpenAI
) -> None:
    engine.enqueue(Script(silent_after_chunks=250))
    body = json.dumps({**asking(1000), "stream": True}).encode()
    async with RawClient(router.url) as client:
        client.post(CHAT, body, ("authorization: Bearer key-a",))
        await client.until(b"w249 ")
    await router.idle()
    record = router.latest()
    assert record["actual"]["finish"] == "cancelled"
    assert record["actual"]["output_tokens"] == 250
    answer = await router.client.post(CHAT, json=BODY, headers=ALICE)
    assert answer.status_code == 429


async def test_requests_that_are_refused_cost_nothing(router: LoopbackRouter) -> None:
    long = {**BODY, "model": "none", "messages": [{"role": "user", "content": "x" * 780}]}
    for _ in range(3):
        answer = await router.client.post(CHAT, json=long, headers=ALICE)
        assert answer.status_code == 404
    assert (await router.client.post(CHAT, json=BODY, headers=ALICE)).status_code == 200
    await router.idle()


async def test_the_scheduler_hears_of_tenants_and_weights(router: LoopbackRouter) -> None:
    for headers in (ALICE, BOB):
        await router.client.post(CHAT, json=BODY, headers=headers)
    await router.idle()
    arrived = [e.request for e, _ in router.steps if isinstance(e, m.RequestArrived)]
    assert [(r.tenant, r.tenant_weight) for r in arrived] == [("alice", 3.0), ("bob", 1.0)]
