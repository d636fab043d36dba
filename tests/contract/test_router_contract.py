"""What the router itself promises, whatever engine is behind it.

Every test of this file holds for real engines too: tests/engines runs it against them.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator

import httpx
import pytest

from router.testing.contract import CHAT, COMPLETIONS, JSON, Served, chat, completion, events

ENVELOPE = {"message", "type", "param", "code"}
BAD_BODIES = {
    "no json": (b"{", "invalid_json"),
    "no object": (b"[]", "invalid_value"),
    "bad text": (b'{"model":"m","messages":"\xff"}', "invalid_json"),
    "no model": (b'{"messages":[{"role":"user","content":"x"}]}', "invalid_value"),
    "no messages": (b'{"model":"%b"}', "missing_required_parameter"),
    "empty messages": (b'{"model":"%b","messages":[]}', "invalid_value"),
    "negative limit": (b'{"model":"%b","messages":[{}],"max_tokens":-1}', "invalid_value"),
}


def worker_of(answer: httpx.Response) -> str:
    """Who decoded an answer."""
    return answer.headers["x-splitserve-workers"].rpartition("=")[2]


@pytest.mark.parametrize("name", BAD_BODIES)
async def test_a_wrong_body_is_explained(served: Served, name: str) -> None:
    body, code = BAD_BODIES[name]
    content = body.replace(b"%b", served.model.encode())
    answer = await served.router.client.post(CHAT, content=content, headers=JSON)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error.keys() == ENVELOPE
    assert (error["type"], error["code"]) == ("invalid_request_error", code)


async def test_a_route_that_is_none(served: Served) -> None:
    client = served.router.client
    assert (await client.get(CHAT)).status_code == 405
    assert (await client.get("/nothing")).status_code == 404


async def test_a_body_in_pieces(served: Served) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b'{"model":"%b","max_tokens":2,' % served.model.encode()
        yield b'"messages":[{"role":"user","content":"hi"}]}'

    answer = await served.router.client.post(CHAT, content=pieces(), headers=JSON)
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 2


async def test_one_connection_serves_many(served: Served) -> None:
    limits = httpx.Limits(max_connections=1)
    known = httpx.AsyncClient(base_url=served.router.url, limits=limits, timeout=60, verify=False)
    async with known as client:
        texts = set()
        for path in (CHAT, COMPLETIONS, CHAT):
            body = chat(served) if path == CHAT else completion(served)
            answer = await client.post(path, json=body)
            assert answer.status_code == 200
            if path == CHAT:
                texts.add(answer.json()["choices"][0]["message"]["content"])
        assert len(texts) == 1
        assert len(served.router.server_state.connections) <= 2  # this one and the fixture's


async def test_many_at_once(served: Served) -> None:
    bodies = [chat(served, stream=bool(number % 2)) for number in range(8)]
    sent = (served.router.client.post(CHAT, json=body) for body in bodies)
    for body, answer in zip(bodies, await asyncio.gather(*sent), strict=True):
        assert answer.status_code == 200
        if body["stream"]:
            assert events(answer)
        else:
            assert answer.json()["usage"]["completion_tokens"] == 4


async def test_a_client_that_leaves_frees_its_worker(served: Served) -> None:
    body = chat(served, stream=True, max_tokens=1000, ignore_eos=True)
    client = served.router.client
    async with client.stream("POST", CHAT, json=body) as answer:
        await anext(answer.aiter_bytes())
    await served.router.idle()
    assert served.router.latest()["actual"]["finish"] == "cancelled"
    assert (await client.post(CHAT, json=chat(served))).status_code == 200


async def test_a_stream_comes_as_it_is_made(served: Served) -> None:
    body = chat(served, stream=True, max_tokens=16)
    async with served.router.client.stream("POST", CHAT, json=body) as answer:
        pieces = [piece async for piece in answer.aiter_raw()]
    assert len(pieces) > 1
    assert b"".join(pieces).endswith(b"data: [DONE]\n\n")
    assert "content-length" not in answer.headers


async def test_the_decision_is_on_record(served: Served) -> None:
    body = chat(served, stream=True, stream_options={"include_usage": True})
    answer = await served.router.client.post(CHAT, json=body)
    record = await served.router.record(answer)
    assert record["model"] == served.model
    assert record["chosen"]["plan"] == served.plan
    assert record["chosen"] in record["candidates"]
    assert record["chosen"]["feasible"]
    assert record["chosen"]["predicted_ttft_ms"] > 0
    actual = record["actual"]
    assert (actual["finish"], actual["output_tokens"]) == ("done", 4)
    assert actual["ttft_ms"] > 0
    assert record["prompt_tokens"] > 0


async def test_targets_of_one_request(served: Served) -> None:
    headers = {"x-slo-ttft-ms": "60000", "x-slo-tpot-ms": "20000"}
    answer = await served.router.client.post(CHAT, json=chat(served), headers=headers)
    record = await served.router.record(answer)
    assert record["targets"] == {"ttft_ms": 60000, "tpot_ms": 20000, "deadline_ms": None}
    wrong = await served.router.client.post(CHAT, json=chat(served), headers={"x-slo-ttft-ms": "x"})
    assert wrong.status_code == 400
    assert wrong.json()["error"]["param"] == "x-slo-ttft-ms"


async def test_a_plan_and_a_worker_may_be_forced(served: Served) -> None:
    client = served.router.client
    first = await client.post(CHAT, json=chat(served))
    worker = worker_of(first)
    headers = {"x-splitserve-worker": worker, "x-splitserve-plan": served.plan}
    forced = await client.post(CHAT, json=chat(served), headers=headers)
    assert forced.status_code == 200
    assert worker_of(forced) == worker
    nobody = await client.post(CHAT, json=chat(served), headers={"x-splitserve-worker": "nobody"})
    assert nobody.status_code >= 400
    assert nobody.json()["error"].keys() == ENVELOPE


async def test_requests_are_counted(served: Served) -> None:
    async def count() -> float:
        text = (await served.router.client.get("/metrics")).text
        found = re.findall(r"^splitserve_requests_total\{[^}]*\} (\S+)$", text, re.MULTILINE)
        return sum(map(float, found))

    before = await count()
    await served.router.client.post(CHAT, json=chat(served))
    await served.router.idle()
    assert await count() == before + 1


async def test_ready_with_a_worker(served: Served) -> None:
    client = served.router.client
    assert (await client.get("/health")).status_code == 200
    assert (await client.get("/ready")).status_code == 200
    listed = (await client.get("/admin/workers")).json()["workers"]
    assert listed
