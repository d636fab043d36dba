"""The fake backend's own behaviour, as an ordinary client sees it."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from router.testing.fake_openai import FakeOpenAI
from router.testing.script import Script


@pytest.fixture
async def client(fake: FakeOpenAI) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=fake.url) as it:
        yield it


def events(text: str) -> list[Any]:
    found = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
    return [event if event == "[DONE]" else json.loads(event) for event in found]


async def test_health_and_models(client: httpx.AsyncClient) -> None:
    assert (await client.get("/health")).status_code == 200
    models = (await client.get("/v1/models")).json()
    assert [model["id"] for model in models["data"]] == ["m"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_plain_and_stream_say_the_same(client: httpx.AsyncClient, path: str) -> None:
    body = {"model": "m", "max_tokens": 3, "n": 2}
    plain = (await client.post(path, json=body)).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage, done = events((await client.post(path, json=body | options)).text)
    assert done == "[DONE]"
    for index in range(2):
        choice = plain["choices"][index]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        parts = [chunk["choices"][index] for chunk in chunks]
        assert text == "".join(p["text"] if "text" in p else p["delta"]["content"] for p in parts)
        assert [part["finish_reason"] for part in parts] == [None, None, "length"]
    assert plain["usage"]["completion_tokens"] == usage["usage"]["completion_tokens"] == 6
    assert usage["choices"] == []


async def test_usage_in_the_stream_only_when_asked(client: httpx.AsyncClient) -> None:
    body = {"model": "m", "max_tokens": 2, "stream": True}
    assert "usage" not in (await client.post("/v1/completions", json=body)).text


async def test_header_overrides_the_queue_and_the_queue_the_script(
    fake: FakeOpenAI, client: httpx.AsyncClient
) -> None:
    fake.set_script(Script(status=500))
    fake.enqueue(Script(status=429), Script(status=429))

    async def status(**headers: str) -> int:
        return (await client.post("/v1/completions", json={}, headers=headers)).status_code

    assert await status() == 429
    assert await status(**{"x-fake": '{"status": 418}'}) == 418
    assert await status() == 500


@pytest.mark.parametrize("header", ["{", "[]", '{"statsu": 1}'])
async def test_wrong_knob_is_refused_not_ignored(client: httpx.AsyncClient, header: str) -> None:
    reply = await client.post("/v1/completions", json={}, headers={"x-fake": header})
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "fake_script"


async def test_fields_laid_over_and_left_out(fake: FakeOpenAI, client: httpx.AsyncClient) -> None:
    fake.set_script(Script(merge={"kv_transfer_params": {"a": 1}}, drop=("usage", "id")))
    reply = (await client.post("/v1/completions", json={"model": "m"})).json()
    assert reply["kv_transfer_params"] == {"a": 1}
    assert not reply.keys() & {"usage", "id"}


@pytest.mark.parametrize(
    "body",
    [
        "{",
        "[]",
        "\ud800",
        '{"max_tokens": 1e99}',
        '{"max_tokens": 9999999999999}',
        '{"max_tokens": -1}',
        '{"max_completion_tokens": "many"}',
        '{"n": [1]}',
        '{"n": 1000000}',
        '{"stream_options": 1}',
        "[" * 100_000,
    ],
)
async def test_body_that_no_engine_would_take_is_400(client: httpx.AsyncClient, body: str) -> None:
    content = body.encode("utf-8", "surrogatepass")
    for _ in range(2):  # the connection goes on
        reply = await client.post("/v1/chat/completions", content=content)
        assert reply.status_code == 400
        assert reply.json()["error"]["type"] == "invalid_request_error"


async def test_key_is_required_on_every_route() -> None:
    async with FakeOpenAI(api_key="k") as fake, httpx.AsyncClient(base_url=fake.url) as client:
        for path in ("/health", "/v1/models"):
            assert (await client.get(path)).status_code == 401
            right = {"authorization": "Bearer k"}
            assert (await client.get(path, headers=right)).status_code == 200


async def test_requests_are_recorded_within_the_bound() -> None:
    async with (
        FakeOpenAI(record_limit=2) as fake,
        httpx.AsyncClient(base_url=fake.url) as client,
    ):
        for number in range(3):
            await client.post(f"/v1/completions?n={number}", json={"n": 1}, headers={"X-A": "b"})
        await fake.until(lambda f: f.requests[-1].outcome == "done")
        assert [request.path[-1] for request in fake.requests] == ["1", "2"]
        last = fake.requests[-1]
        assert (last.method, last.headers["x-a"], last.json()) == ("POST", "b", {"n": 1})


async def test_nothing_is_left_open(fake: FakeOpenAI, client: httpx.AsyncClient) -> None:
    await client.post("/v1/completions", json={"stream": True})
    await client.aclose()
    await fake.until(lambda f: f.open_connections == 0)
    assert fake.open_streams == 0
