"""What a client may rely on, whatever engine is behind the router and however it is split."""

from __future__ import annotations

import json
from typing import Any, Protocol

import httpx
import pytest

from router.testing.connection import RecordedRequest
from router.testing.loopback_router import LoopbackRouter

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
JSON = {"content-type": "application/json"}


class Served(Protocol):
    """The fixture; see conftest."""

    @property
    def router(self) -> LoopbackRouter: ...
    @property
    def engine_url(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def plan(self) -> str: ...
    @property
    def received(self) -> Any: ...


def chat(served: Served, **more: object) -> dict[str, object]:
    messages = [{"role": "user", "content": "Say something."}]
    return {"model": served.model, "messages": messages, "max_tokens": 4, **more}


def completion(served: Served, **more: object) -> dict[str, object]:
    return {"model": served.model, "prompt": "Say something.", "max_tokens": 4, **more}


async def both(
    served: Served, path: str, body: dict[str, object]
) -> tuple[httpx.Response, httpx.Response]:
    """The answer through the router, and the engine's own to the same bytes."""
    content = json.dumps(body).encode()
    client = served.router.client
    routed = await client.post(path, content=content, headers=JSON)
    direct = await client.post(served.engine_url + path, content=content, headers=JSON)
    return routed, direct


def assert_same(routed: httpx.Response, direct: httpx.Response) -> None:
    assert routed.status_code == direct.status_code
    assert routed.content == direct.content
    assert routed.headers["content-type"] == direct.headers["content-type"]


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a stream, which must end with exactly one [DONE]."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    assert lines.count("data: [DONE]") == 1
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def test_chat(served: Served) -> None:
    routed, direct = await both(served, CHAT, chat(served))
    assert_same(routed, direct)
    assert routed.headers["x-splitserve-plan"] == served.plan
    answer = routed.json()
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert answer["choices"][0]["message"]["content"]


async def test_chat_stream(served: Served) -> None:
    routed, direct = await both(served, CHAT, chat(served, stream=True))
    assert_same(routed, direct)
    chunks = events(routed)
    whole = await served.router.client.post(CHAT, json=chat(served))
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
    assert text == whole.json()["choices"][0]["message"]["content"]
    reasons = [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]]
    assert [r for r in reasons if r is not None] == [reasons[-1]]
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    roles = [c["choices"][0]["delta"].get("role") for c in chunks if c["choices"]]
    assert [role for role in roles if role] == ["assistant"]


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_completions(served: Served, stream: bool) -> None:
    routed, direct = await both(served, COMPLETIONS, completion(served, stream=stream))
    assert_same(routed, direct)
    assert routed.headers["x-splitserve-plan"] == served.plan
    answers = events(routed) if stream else [routed.json()]
    assert "".join(answer["choices"][0]["text"] for answer in answers)


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_stop_and_n_reach_the_engine(served: Served, stream: bool) -> None:
    body = chat(served, stop=["\n", "END"], n=3, stream=stream)
    routed, direct = await both(served, CHAT, body)
    assert_same(routed, direct)
    answers = events(routed) if stream else [routed.json()]
    indices = {choice["index"] for answer in answers for choice in answer["choices"]}
    assert indices == {0, 1, 2}


async def test_usage_is_the_engines_own(served: Served) -> None:
    routed, direct = await both(served, CHAT, chat(served))
    assert routed.json()["usage"] == direct.json()["usage"]
    assert routed.json()["usage"]["completion_tokens"] == 4


async def test_usage_in_a_stream_only_when_it_is_asked_for(served: Served) -> None:
    asked = chat(served, stream=True, stream_options={"include_usage": True})
    routed, direct = await both(served, CHAT, asked)
    assert_same(routed, direct)
    *_, last = events(routed)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4
    silent = await served.router.client.post(CHAT, json=chat(served, stream=True))
    assert not any(chunk.get("usage") for chunk in events(silent))


UNKNOWN = b"""{ "future_field" : {"a":[1.50, 1e-7, "\\u00e9\xc3\xa9"]},
  "tools":[{"type":"function","function":{"name":"f"}}], "response_format": {"type" :"text"},
  "temperature":0.30000000000000004,"seed":-1, "logit_bias":{"50256":-100},"user":"\\ud83e\\udd99",
  "max_tokens":4,"model":"%b","messages":[{"role":"user","content":"hi","x":null}] }"""


async def test_body_reaches_the_engine_byte_for_byte(served: Served) -> None:
    body = UNKNOWN.replace(b"%b", served.model.encode())
    answer = await served.router.client.post(CHAT, content=body, headers=JSON)
    assert answer.status_code == 200
    if served.received is None:
        pytest.skip("this engine does not tell what it was sent")
    received: RecordedRequest = served.received()
    assert received.body == body
    assert received.headers["content-length"] == str(len(body))


async def test_an_engines_4xx_is_passed_on(served: Served) -> None:
    headers = {**JSON, "x-fake": '{"status": 400}'}
    content = json.dumps(chat(served)).encode()
    client = served.router.client
    routed = await client.post(CHAT, content=content, headers=headers)
    direct = await client.post(served.engine_url + CHAT, content=content, headers=headers)
    assert routed.status_code == 400
    assert_same(routed, direct)


async def test_unknown_model(served: Served) -> None:
    answer = await served.router.client.post(CHAT, json=chat(served) | {"model": "no-such"})
    assert answer.status_code == 404
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert error["type"] == "invalid_request_error"
    assert "no-such" in error["message"]


async def test_models(served: Served) -> None:
    client = served.router.client
    listed = (await client.get("/v1/models")).json()
    assert listed["object"] == "list"
    assert [card["id"] for card in listed["data"]] == [served.model]
    one = await client.get(f"/v1/models/{served.model}")
    assert one.json() == listed["data"][0]
    assert (await client.get("/v1/models/no-such")).status_code == 404


async def test_request_id_is_echoed(served: Served) -> None:
    headers = {"x-request-id": "id of the client"}
    for stream in (False, True):
        body = chat(served, stream=stream)
        answer = await served.router.client.post(CHAT, json=body, headers=headers)
        assert answer.headers["x-request-id"] == "id of the client"
    answer = await served.router.client.post(CHAT, json=chat(served))
    assert answer.headers["x-request-id"]


async def test_the_headers_tell_what_was_done(served: Served) -> None:
    answer = await served.router.client.post(CHAT, json=chat(served))
    workers = dict(part.split("=") for part in answer.headers["x-splitserve-workers"].split(","))
    expected = {"aggregated"} if served.plan == "aggregated" else {"prefill", "decode"}
    assert workers.keys() == expected
    assert float(answer.headers["x-splitserve-queue-ms"]) >= 0
    assert float(answer.headers["x-splitserve-predicted-ttft-ms"]) >= 0
