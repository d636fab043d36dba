"""Headers of the client and of the engine: obeyed, passed on, or kept back."""

import json
from collections.abc import AsyncIterator

import httpx
import pytest

from router.testing.fake_openai import FakeOpenAI
from router.testing.loopback_router import LoopbackRouter, Split
from router.testing.raw_client import RawClient
from router.testing.script import Script

CHAT = "/v1/chat/completions"
PLAIN = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@pytest.fixture
async def engine() -> AsyncIterator[FakeOpenAI]:
    async with FakeOpenAI() as fake:
        yield fake


@pytest.fixture
async def router(engine: FakeOpenAI) -> AsyncIterator[LoopbackRouter]:
    async with LoopbackRouter({"url": engine.url, "name": "e"}) as running:
        yield running


def error_of(answer: httpx.Response) -> dict[str, str]:
    return dict(answer.json()["error"])


# --- forced plans and workers ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers,workers",
    [
        ({}, "prefill=p,decode=d"),
        ({"x-splitserve-plan": "auto"}, "prefill=p,decode=d"),
        ({"x-splitserve-plan": "disaggregated"}, "prefill=p,decode=d"),
        ({"x-splitserve-plan": "aggregated"}, "aggregated=d"),
        ({"x-splitserve-worker": "d"}, "prefill=p,decode=d"),
        ({"x-splitserve-plan": "aggregated", "x-splitserve-worker": "p"}, None),
        ({"x-splitserve-worker": "nobody"}, None),
    ],
)
async def test_forced_plan_and_worker(
    split: Split, headers: dict[str, str], workers: str | None
) -> None:
    answer = await split.router.client.post(CHAT, json=PLAIN, headers=headers)
    if workers is None:
        assert answer.status_code == 400
        assert error_of(answer)["code"] == "unplannable"
        assert "leave out x-splitserve-plan" in error_of(answer)["message"]
    else:
        assert answer.headers["x-splitserve-workers"] == workers
    await split.router.idle()


async def test_split_that_nobody_can_do_is_refused(router: LoopbackRouter) -> None:
    headers = {"x-splitserve-plan": "disaggregated"}
    answer = await router.client.post(CHAT, json=PLAIN, headers=headers)
    assert answer.status_code == 400
    assert error_of(answer)["code"] == "unplannable"


# --- targets and classes --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers,body,expected",
    [
        ({}, {}, ("interactive", 1000.0, 50.0, None)),
        ({"x-slo-class": "agent"}, {}, ("agent", None, None, 5000.0)),
        ({"x-slo-class": "batch"}, {}, ("batch", None, None, 86_400_000.0)),
        ({}, {"service_tier": "flex"}, ("batch", None, None, 86_400_000.0)),
        ({"x-slo-class": "agent"}, {"service_tier": "priority"}, ("agent", None, None, 5000.0)),
        ({}, {"service_tier": "priority"}, ("interactive", 1000.0, 50.0, None)),
        ({}, {"service_tier": "unheard-of"}, ("interactive", 1000.0, 50.0, None)),
        ({"x-slo-ttft-ms": "12.5"}, {}, ("interactive", 12.5, 50.0, None)),
        ({"x-slo-tpot-ms": "7"}, {}, ("interactive", 1000.0, 7.0, None)),
        ({"x-slo-deadline-ms": "9"}, {}, ("interactive", 1000.0, 50.0, 9.0)),
        (
            {"x-llm-d-slo-ttft-ms": "3", "x-llm-d-slo-tpot-ms": "4"},
            {},
            ("interactive", 3.0, 4.0, None),
        ),
    ],
)
async def test_class_and_targets(
    router: LoopbackRouter,
    headers: dict[str, str],
    body: dict[str, str],
    expected: tuple[str, float | None, float | None, float | None],
) -> None:
    answer = await router.client.post(CHAT, json={**PLAIN, **body}, headers=headers)
    record = await router.record(answer)
    targets = record["targets"]
    found = (record["class"], targets["ttft_ms"], targets["tpot_ms"], targets["deadline_ms"])
    assert found == expected


@pytest.mark.parametrize("value", ["", "fast", "-1", "0", "nan", "inf", "1e99", "\u00e9"])
@pytest.mark.parametrize("name", ["x-slo-ttft-ms", "x-slo-tpot-ms", "x-slo-deadline-ms"])
async def test_malformed_target_is_refused(router: LoopbackRouter, name: str, value: str) -> None:
    headers = [(name.encode(), value.encode("latin-1"))]
    answer = await router.client.post(CHAT, json=PLAIN, headers=headers)
    assert answer.status_code == 400
    assert error_of(answer)["param"] == name


@pytest.mark.parametrize("name", ["x-slo-class", "x-splitserve-plan"])
async def test_unknown_word_is_refused_by_name(router: LoopbackRouter, name: str) -> None:
    answer = await router.client.post(CHAT, json=PLAIN, headers={name: "no-such"})
    assert answer.status_code == 400
    assert error_of(answer)["param"] == name
    assert "'no-such'" in error_of(answer)["message"]


# --- what travels and what does not ---------------------------------------------------------------

KEPT_BACK = {
    "authorization": "Bearer secret",
    "cookie": "a=b",
    "x-api-key": "secret",
    "api-key": "secret",
    "proxy-authorization": "Basic x",
    "te": "trailers",
    "keep-alive": "timeout=5",
    "proxy-connection": "keep-alive",
    "x-named-by-connection": "1",
    "x-splitserve-handoff": "forged",
    "x-splitserve-plan": "auto",
    "x-data-parallel-rank": "3",
    "x-vllm-priority": "-9",
}


async def test_what_is_not_passed_on_to_a_worker(
    engine: FakeOpenAI, router: LoopbackRouter
) -> None:
    headers = {
        **KEPT_BACK,
        "connection": "keep-alive, X-Named-By-Connection",
        "x-mine": "1",
        "user-agent": "me",
        "x-request-id": "from-the-client",
    }
    answer = await router.client.post(CHAT, json=PLAIN, headers=headers)
    assert answer.status_code == 200
    sent = engine.requests[-1].headers
    assert KEPT_BACK.keys() & sent.keys() == set()
    assert (sent["x-mine"], sent["user-agent"]) == ("1", "me")
    assert sent["content-type"] == "application/json"
    assert sent["x-request-id"] == answer.headers["x-splitserve-request-id"]
    assert "secret" not in json.dumps(sent)


async def test_what_is_not_passed_back(engine: FakeOpenAI, router: LoopbackRouter) -> None:
    engine.enqueue(
        Script(
            headers={
                "x-engine": "1",
                "server": "engine",
                "date": "long ago",
                "x-request-id": "of the engine",
                "x-splitserve-prefill-ms": "1",
                "x-hop": "1",
                "keep-alive": "timeout=9",
                "connection": "x-hop",
            }
        )
    )
    answer = await router.client.post(CHAT, json=PLAIN, headers={"x-request-id": "mine"})
    assert answer.headers["x-engine"] == "1"
    assert answer.headers["x-request-id"] == "mine"
    gone = {"server", "x-splitserve-prefill-ms", "x-hop", "keep-alive"}
    assert gone & set(answer.headers) == set()
    assert answer.headers.get("date") != "long ago"


async def test_request_id_is_echoed_with_errors_too(router: LoopbackRouter) -> None:
    for body in (PLAIN, {**PLAIN, "model": "none"}, {"model": 5}):
        answer = await router.client.post(CHAT, json=body, headers={"x-request-id": "mine"})
        assert answer.headers["x-request-id"] == "mine"


async def test_request_id_that_repeats_does_not_collide(
    engine: FakeOpenAI, router: LoopbackRouter
) -> None:
    headers = {"x-request-id": "same"}
    answers = [await router.client.post(CHAT, json=PLAIN, headers=headers) for _ in range(3)]
    ids = {answer.headers["x-splitserve-request-id"] for answer in answers}
    assert len(ids) == 3
    newest = (await router.client.get("/admin/requests/same")).json()
    assert newest["request_id"] == answers[-1].headers["x-splitserve-request-id"]
    assert newest["client_request_id"] == "same"


async def test_query_travels(engine: FakeOpenAI, router: LoopbackRouter) -> None:
    await router.client.post(f"{CHAT}?api-version=1&x=%20", json=PLAIN)
    assert engine.requests[-1].path == f"{CHAT}?api-version=1&x=%20"


@pytest.mark.parametrize(
    "path", ["/v1/../admin/workers", "/v1/%2e%2e/splitserve/release/x", "/v1/./models", "/v1/a/.."]
)
async def test_path_cannot_leave_v1(engine: FakeOpenAI, router: LoopbackRouter, path: str) -> None:
    async with RawClient(router.url) as client:
        client.post(path, json.dumps(PLAIN).encode())
        answer = await client.answer()
    assert answer.status == 404
    assert answer.json()["error"]["code"] == "bad_path"
    assert [r for r in engine.requests if r.method == "POST"] == []
