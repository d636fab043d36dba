"""The OpenAI client library works against the router, whatever engine is behind it.

Every test of this file holds for real engines too: tests/engines runs it against them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest

from router.testing.contract import Served

ASKED: list[openai.types.chat.ChatCompletionMessageParam] = [
    {"role": "user", "content": "Say something."}
]


@pytest.fixture
async def sdk(served: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{served.router.url}/v1"
    http_client = openai.DefaultAsyncHttpxClient(verify=False)  # nothing here is TLS
    client = openai.AsyncOpenAI(
        base_url=url, api_key="none", max_retries=0, http_client=http_client
    )
    async with client:
        yield client


async def test_sdk_chat(served: Served, sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.chat.completions.create(model=served.model, messages=ASKED, max_tokens=4)
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4


async def test_sdk_stream(served: Served, sdk: openai.AsyncOpenAI) -> None:
    stream = await sdk.chat.completions.create(
        model=served.model,
        messages=ASKED,
        max_tokens=4,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 4


async def test_sdk_completion(served: Served, sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.completions.create(model=served.model, prompt="Once", max_tokens=4)
    assert answer.choices[0].text
    assert answer.choices[0].finish_reason == "length"


async def test_sdk_models(served: Served, sdk: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in sdk.models.list()] == [served.model]
    assert (await sdk.models.retrieve(served.model)).id == served.model


async def test_sdk_errors(served: Served, sdk: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="no-such"):
        await sdk.chat.completions.create(model="no-such", messages=ASKED)
    with pytest.raises(openai.BadRequestError):
        await sdk.chat.completions.create(model=served.model, messages=[])
