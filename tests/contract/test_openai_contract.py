"""What a client may rely on, whatever engine is behind the router and however it is split.

Every test of this file holds for real engines too: tests/engines runs it against them.
"""

from __future__ import annotations

import pytest

from router.testing.contract import (
    CHAT,
    COMPLETIONS,
    Served,
    answers,
    assert_same,
    both,
    chat,
    completion,
    events,
)


async def test_chat(served: Served) -> None:
    routed, direct = await both(served, CHAT, chat(served))
    assert_same(served, routed, direct)
    assert routed.headers["x-splitserve-plan"] == served.plan
    answer = routed.json()
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert answer["choices"][0]["message"]["content"]


async def test_chat_stream(served: Served) -> None:
    routed, direct = await both(served, CHAT, chat(served, stream=True))
    assert_same(served, routed, direct)
    chunks = events(routed)
    whole = await served.router.client.post(CHAT, json=chat(served))
    text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"])
    assert text == whole.json()["choices"][0]["message"]["content"]
    reasons = [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]]
    assert [r for r in reasons if r is not None] == [reasons[-1]]
    assert len({chunk["id"] for chunk in chunks}) == 1
    roles = [c["choices"][0]["delta"].get("role") for c in chunks if c["choices"]]
    assert [role for role in roles if role] == ["assistant"]


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_completions(served: Served, stream: bool) -> None:
    routed, direct = await both(served, COMPLETIONS, completion(served, stream=stream))
    assert_same(served, routed, direct)
    assert routed.headers["x-splitserve-plan"] == served.plan
    texts = [choice["text"] for answer in answers(routed) for choice in answer["choices"]]
    assert "".join(texts)


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
async def test_stop_and_n_reach_the_engine(served: Served, stream: bool) -> None:
    body = chat(served, stop=["\n", "END"], n=3, temperature=0.9, seed=3, stream=stream)
    routed, direct = await both(served, CHAT, body)
    assert_same(served, routed, direct)
    indices = {choice["index"] for answer in answers(routed) for choice in answer["choices"]}
    assert indices == {0, 1, 2}


async def test_usage_is_the_engines_own(served: Served) -> None:
    routed, direct = await both(served, CHAT, chat(served))
    assert_same(served, routed, direct)
    assert routed.json()["usage"]["completion_tokens"] == 4


async def test_usage_in_a_stream_only_when_it_is_asked_for(served: Served) -> None:
    asked = chat(served, stream=True, stream_options={"include_usage": True})
    routed, direct = await both(served, CHAT, asked)
    assert_same(served, routed, direct)
    *_, last = events(routed)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 4
    silent = await served.router.client.post(CHAT, json=chat(served, stream=True))
    assert not any(chunk.get("usage") for chunk in events(silent))


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
