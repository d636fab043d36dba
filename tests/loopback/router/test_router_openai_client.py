"""The official `openai` client against the router: answers, and its own exception classes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import openai
import pytest

from router.testing.fake_openai import FakeOpenAI
from router.testing.loopback_router import LoopbackRouter
from router.testing.script import Script

ENVIRON = {"ALICE": "key-a"}
TENANTS = [{"name": "alice", "key_env": "ALICE"}]
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def engine() -> AsyncIterator[FakeOpenAI]:
    async with FakeOpenAI() as fake:
        yield fake


@pytest.fixture
async def router(engine: FakeOpenAI) -> AsyncIterator[LoopbackRouter]:
    worker = {"url": engine.url, "name": "e"}
    async with LoopbackRouter(worker, environ=ENVIRON, tenants=TENANTS) as running:
        yield running
        await running.idle()


@pytest.fixture
async def client(router: LoopbackRouter) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=router.url + "/v1", api_key="key-a", max_retries=0, timeout=5
    ) as made:
        yield made


async def in_thread(router: LoopbackRouter, work: Callable[[openai.OpenAI], Any]) -> Any:
    """Run `work` with the synchronous client, beside the loop that serves it."""

    def run() -> Any:
        with openai.OpenAI(
            base_url=router.url + "/v1", api_key="key-a", max_retries=0, timeout=5
        ) as made:
            return work(made)

    return await asyncio.to_thread(run)


WORDS = "w0 w1 w2 "


async def test_chat(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=3)
    assert answer.choices[0].message.content == WORDS
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


async def test_chat_stream(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="m", messages=MESSAGES, max_tokens=3, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    chunks = [chunk async for chunk in stream]
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert "".join(text or "" for text in texts) == WORDS
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 3


async def test_stream_left_by_the_client(client: openai.AsyncOpenAI, engine: FakeOpenAI) -> None:
    engine.enqueue(Script(silent_after_chunks=1))
    stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
    await anext(stream)
    await stream.close()
    await engine.until(lambda fake: fake.open_streams == 0, timeout_s=1)


async def test_completions(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="m", prompt="hi", max_tokens=3, n=2)
    assert [choice.text for choice in answer.choices] == [WORDS, WORDS]
    stream = await client.completions.create(model="m", prompt="hi", max_tokens=3, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == WORDS


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [card.id async for card in client.models.list()] == ["m"]
    assert (await client.models.retrieve("m")).id == "m"
    with pytest.raises(openai.NotFoundError) as caught:
        await client.models.retrieve("none")
    assert caught.value.code == "model_not_found"


async def test_sync_client(router: LoopbackRouter) -> None:
    def work(client: openai.OpenAI) -> None:
        answer = client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=3)
        assert answer.choices[0].message.content == WORDS
        stream = client.chat.completions.create(
            model="m", messages=MESSAGES, max_tokens=3, stream=True
        )
        assert "".join(c.choices[0].delta.content or "" for c in stream) == WORDS
        text = client.completions.create(model="m", prompt="hi", max_tokens=3).choices[0].text
        assert text == WORDS
        assert [card.id for card in client.models.list()] == ["m"]
        assert client.models.retrieve("m").id == "m"
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="none", messages=MESSAGES)

    await in_thread(router, work)


async def test_raw_response_has_the_routers_headers(client: openai.AsyncOpenAI) -> None:
    raw = await client.chat.completions.with_raw_response.create(
        model="m", messages=MESSAGES, extra_headers={"x-slo-class": "agent"}
    )
    assert raw.headers["x-splitserve-workers"] == "aggregated=e"
    assert raw.parse().choices[0].message.content


# --- its exceptions -------------------------------------------------------------------------------


async def ask(client: openai.AsyncOpenAI, model: str = "m", **more: Any) -> None:
    await client.chat.completions.create(model=model, messages=MESSAGES, **more)


async def test_bad_request(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await ask(client, max_tokens=-1)
    assert caught.value.param == "max_tokens"
    assert "max_tokens" in caught.value.message


async def test_engines_own_bad_request(client: openai.AsyncOpenAI, engine: FakeOpenAI) -> None:
    engine.enqueue(Script(status=400))
    with pytest.raises(openai.BadRequestError, match="scripted 400"):
        await ask(client)


async def test_not_found(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await ask(client, model="gpt-9")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")


async def test_authentication(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.AuthenticationError) as caught:
        await ask(client.with_options(api_key="wrong"))
    assert caught.value.code == "invalid_api_key"


async def test_permission(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.PermissionDeniedError):
        await ask(client, extra_headers={"x-splitserve-plan": "aggregated"})


async def test_rate_limit(client: openai.AsyncOpenAI, engine: FakeOpenAI) -> None:
    engine.enqueue(*[Script(status=429, headers={"retry-after": "3"})] * 3)
    with pytest.raises(openai.RateLimitError) as caught:
        await ask(client)
    assert caught.value.response.headers["retry-after"] == "3"


async def test_bad_gateway(client: openai.AsyncOpenAI, engine: FakeOpenAI) -> None:
    engine.enqueue(*[Script(status=500)] * 3)
    with pytest.raises(openai.InternalServerError) as caught:
        await ask(client)
    assert caught.value.status_code == 502
    assert caught.value.code == "worker_failed"


async def test_error_in_the_stream(client: openai.AsyncOpenAI, engine: FakeOpenAI) -> None:
    engine.enqueue(Script(cut="rst", cut_after_chunks=2))
    stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
    for _ in range(2):
        assert (await anext(stream)).choices
    with pytest.raises(openai.APIError, match="closed the connection") as caught:
        await anext(stream)
    assert caught.value.code == "worker_broke"


async def test_connection_error() -> None:
    client = openai.AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="x", max_retries=0)
    with pytest.raises(openai.APIConnectionError):
        await ask(client)
    await client.close()


async def test_plain_answer_that_breaks_is_a_connection_error(
    client: openai.AsyncOpenAI, engine: FakeOpenAI, tolerated: list[str]
) -> None:
    tolerated.append("ASGI callable returned without completing response.")
    engine.enqueue(Script(cut="rst"))
    with pytest.raises(openai.APIConnectionError):
        await ask(client)


async def test_timeout(client: openai.AsyncOpenAI, engine: FakeOpenAI) -> None:
    engine.enqueue(Script(silent=True))
    with pytest.raises(openai.APITimeoutError):
        await ask(client.with_options(timeout=0.1))
    await engine.until(lambda fake: fake.requests[-1].outcome == "client_gone", timeout_s=1)
