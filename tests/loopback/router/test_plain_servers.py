"""Servers of many kinds behind the plain dialect: how they join, and under which names."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import httpx
import pytest

from router.registry import MISSES, Member
from router.testing.fake_openai import FakeOpenAI
from router.testing.loopback_router import LoopbackRouter

CHAT = "/v1/chat/completions"
Routes = dict[str, tuple[int, object]]
NO_LIST = {"/v1/models": (404, {"error": "no such route"})}


def body(model: str) -> dict[str, object]:
    return {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


async def shown(router: LoopbackRouter) -> dict[str, Any]:
    listed = (await router.client.get("/admin/workers")).json()["workers"]
    (worker,) = listed
    known: dict[str, Any] = worker
    return known


OLLAMA: Routes = {
    "/api/tags": (200, {"models": [{"name": "m", "model": "m", "digest": "365c0bd3c000"}]}),
    "/api/version": (200, {"version": "0.12.6"}),
}
LM_STUDIO: Routes = {
    "/api/v0/models": (
        200,
        {
            "data": [
                {
                    "id": "m",
                    "state": "loaded",
                    "compatibility_type": "gguf",
                    "max_context_length": 131072,
                    "loaded_context_length": 4096,
                }
            ]
        },
    ),
    "/api/tags": (200, {"error": "Unexpected endpoint or method. (GET /api/tags)"}),
}
TGI: Routes = {
    "/info": (
        200,
        {
            "model_id": "m",
            "version": "3.3.6",
            "max_concurrent_requests": 128,
            "max_input_tokens": 4095,
            "max_total_tokens": 8192,
        },
    ),
}
LITELLM: Routes = {"/health/readiness": (200, {"status": "connected", "litellm_version": "1.80"})}
KINDS: dict[str, tuple[Routes, str, int, int]] = {
    # what it answers, its name, requests at once, context
    "ollama": (OLLAMA, "ollama", 1, 0),
    "ollama without a model list": (OLLAMA | NO_LIST, "ollama", 1, 0),
    "lm studio": (LM_STUDIO, "lmstudio", 4, 4096),
    "tgi": (TGI, "tgi", 128, 8192),
    "tgi without a model list": (TGI | NO_LIST, "tgi", 128, 8192),
    "litellm": (LITELLM, "litellm", 256, 0),
    "anything": ({}, "openai", 256, 0),
    "anything that says much": (
        {"/api/tags": (200, []), "/api/version": (200, {"version": "1"}), "/info": (200, {"a": 1})},
        "openai",
        256,
        0,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_each_kind_joins_under_its_name(kind: str) -> None:
    routes, engine, max_running, context_tokens = KINDS[kind]
    async with FakeOpenAI(routes=routes) as fake:
        async with LoopbackRouter({"url": fake.url, "name": "w"}) as router:
            known = await shown(router)
            assert (known["engine"], known["models"]) == (engine, ["m"])
            assert known["max_running"] == max_running
            assert known["max_context_tokens"] == context_tokens
            assert (await router.client.post(CHAT, json=body("m"))).status_code == 200
            router.app.registry.poke("w")  # a poll, which asks for the list again
            await fake.until(lambda f: f.requests[-1].method == "GET")
            await router.until(lambda: not router.app.registry.members["w"].poked.is_set())
            assert (await router.client.post(CHAT, json=body("m"))).status_code == 200
            await router.idle()


async def test_what_is_assumed_is_said() -> None:
    async with FakeOpenAI(routes=OLLAMA) as fake:
        async with LoopbackRouter({"url": fake.url, "name": "w"}) as router:
            version, assumed = (await shown(router))["notes"]
            assert version == "version 0.12.6"
            assert assumed.startswith("max_running 1 is assumed, since it does not tell; ")
            assert "OLLAMA_NUM_PARALLEL" in assumed


async def test_a_limit_of_the_configuration_is_taken() -> None:
    async with FakeOpenAI(routes=OLLAMA) as fake:
        worker = {"url": fake.url, "name": "w", "max_running": 6}
        async with LoopbackRouter(worker) as router:
            known = await shown(router)
            assert known["max_running"] == 6
            assert known["notes"] == ["version 0.12.6"]


@pytest.mark.parametrize("status", [401, 403, 404, 405])
@pytest.mark.parametrize("named", [{"model": "m"}, {"model": "m", "engine_model": "own/m"}])
async def test_a_server_without_a_list_joins_with_the_model_named(
    status: int, named: dict[str, str]
) -> None:
    async with FakeOpenAI(routes={"/v1/models": (status, {})}) as fake:
        worker = {"url": fake.url, "name": "w", **named}
        async with LoopbackRouter(worker) as router:
            known = await shown(router)
            assert known["models"] == ["m"]
            assert known["notes"][0].startswith(f"GET /v1/models answered {status}: ")
            answer = await router.client.post(CHAT, json=body("m"))
            assert answer.status_code == 200
            sent = json.loads(fake.requests[-1].body)
            assert sent["model"] == named.get("engine_model", "m")
            await router.idle()


@pytest.mark.parametrize(
    "routes, trouble",
    [
        (NO_LIST, "GET /v1/models answered 404; to use it all the same, name its model"),
        ({"/v1/models": (200, {"x": 1})}, "it has neither data nor models"),
        ({"/v1/models": (200, {"data": None})}, "GET /v1/models lists no model"),
        ({"/v1/models": (500, {})}, "GET /v1/models answered 500"),
    ],
)
async def test_a_server_that_shows_no_model_stays_out(routes: Routes, trouble: str) -> None:
    async with FakeOpenAI(routes=routes) as fake:
        async with LoopbackRouter({"url": fake.url, "name": "w"}, wait=False) as router:
            member = router.app.registry.members["w"]
            await router.until(lambda: trouble in member.trouble)
            assert not member.alive


async def test_a_model_that_is_not_there_is_named_with_what_is() -> None:
    async with FakeOpenAI(models=("a", "b")) as fake:
        worker = {"url": fake.url, "name": "w", "model": "m", "engine_model": "c"}
        async with LoopbackRouter(worker, wait=False) as router:
            member = router.app.registry.members["w"]
            await router.until(lambda: "it serves a, b, not c" in member.trouble)


async def test_a_remote_api_behind_a_path_and_a_key() -> None:
    async with FakeOpenAI(
        models=("vendor/m-large", "other"), api_key="secret", base_path="/openai"
    ) as fake:
        worker = {
            "url": f"{fake.url}/v1/",
            "name": "w",
            "model": "m",
            "engine_model": "vendor/m-large",
            "key_env": "VENDOR_KEY",
        }
        async with LoopbackRouter(worker, environ={"VENDOR_KEY": "secret"}) as router:
            headers = {"authorization": "Bearer of the client"}
            answer = await router.client.post(CHAT, json=body("m"), headers=headers)
            assert answer.status_code == 200
            sent = fake.requests[-1]
            assert sent.path == "/openai/v1/chat/completions"
            assert sent.headers["authorization"] == "Bearer secret"
            assert json.loads(sent.body)["model"] == "vendor/m-large"
            assert (await router.client.get("/v1/models")).json()["data"][0]["id"] == "m"
            await router.idle()


async def test_a_wrong_key_is_seen_by_the_client() -> None:
    """A list that needs a key it has not is no reason to stay out; its answers tell."""
    async with FakeOpenAI(api_key="secret") as fake:
        worker = {"url": fake.url, "name": "w", "model": "m"}
        async with LoopbackRouter(worker) as router:
            answer: httpx.Response = await router.client.post(CHAT, json=body("m"))
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
            await router.idle()


async def test_a_server_that_goes_down_is_lost_though_it_has_no_list() -> None:
    async with FakeOpenAI(routes=NO_LIST) as fake:
        worker = {"url": fake.url, "name": "w", "model": "m"}
        async with LoopbackRouter(worker) as router:
            member = router.app.registry.members["w"]
            fake.routes["/v1/models"] = (503, {})
            for misses in range(1, MISSES + 1):
                router.app.registry.poke("w")
                await router.until(partial(missed, member, misses))
            assert not member.alive


def missed(member: Member, misses: int) -> bool:
    return member.misses == misses
