"""How an SGLang server joins: what it says of itself, and that it works alone."""

from __future__ import annotations

import json
from typing import Any

import pytest

from router.testing.fake_openai import FakeOpenAI
from router.testing.fake_sglang import FAKE_PEER, FakeSglang, Mode
from router.testing.loopback_router import LoopbackRouter
from router.testing.rendezvous import Rendezvous

CHAT = "/v1/chat/completions"
METRICS = """sglang:num_running_reqs{model_name="m",dp_rank="0"} 3.0
sglang:num_running_reqs{model_name="m",dp_rank="1"} 2.0
sglang:num_queue_reqs{model_name="m",dp_rank="0"} 1.0
sglang:num_prefill_inflight_queue_reqs{model_name="m",dp_rank="0"} 4.0
sglang:token_usage{model_name="m",dp_rank="0"} 0.25
"""


async def shown(router: LoopbackRouter) -> dict[str, Any]:
    (worker,) = (await router.client.get("/admin/workers")).json()["workers"]
    known: dict[str, Any] = worker
    return known


@pytest.mark.parametrize("mode", ["prefill", "decode"])
async def test_a_side_joins_in_the_role_it_was_started_in(mode: Mode) -> None:
    async with FakeSglang(mode, Rendezvous()) as fake:
        async with LoopbackRouter({"url": fake.url, "name": "w"}) as router:
            known = await shown(router)
            assert (known["engine"], known["role"], known["models"]) == ("sglang", mode, ["m"])
            assert known["connector"] == "sglang-nixl"
            assert known["pairing_key"] == (
                "model=org/m;page=64;kv_dtype=auto;layout=default;allocation=early;version=0.5.23"
            )
            assert known["max_running"] == 32
            assert known["kv_capacity_tokens"] == 100_000
            assert known["max_context_tokens"] == 4096  # from its model list
            assert known["notes"] == ["version 0.5.23"]
            (alone,) = (r for r in fake.requests if r.path == "/generate")
            assert json.loads(alone.body)["bootstrap_host"] == FAKE_PEER


async def test_a_server_that_does_both_joins_as_one() -> None:
    async with FakeSglang("null") as fake:
        fake.args.context_length = 2048
        fake.args.max_running_requests = None
        async with LoopbackRouter({"url": fake.url, "name": "w"}) as router:
            known = await shown(router)
            assert (known["role"], known["connector"]) == ("aggregated", "")
            assert known["max_context_tokens"] == 2048
            assert known["max_running"] == 256
            assert known["notes"][1].startswith("max_running 256 is assumed")
            body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "x": 1.0}
            assert (await router.client.post(CHAT, json=body)).status_code == 200
            assert json.loads(fake.calls()[0].body) == body
            await router.idle()
        assert [r for r in fake.requests if r.path == "/generate"] == []


@pytest.mark.parametrize("mode, role", [("prefill", "decode"), ("decode", "aggregated")])
async def test_a_role_that_is_not_its_mode_is_refused(mode: Mode, role: str) -> None:
    async with FakeSglang(mode) as fake:
        worker = {"url": fake.url, "name": "w", "role": role, "engine": "sglang"}
        async with LoopbackRouter(worker, wait=False) as router:
            member = router.app.registry.members["w"]
            wanted = f"--disaggregation-mode {mode}, and its role is {role}; correct one of the two"
            await router.until(lambda: wanted in member.trouble)


async def test_a_side_that_fails_alone_stays_out() -> None:
    async with FakeSglang("decode") as fake:
        fake.answer_alone(503)
        worker = {"url": fake.url, "name": "w", "engine": "sglang"}
        async with LoopbackRouter(worker, wait=False) as router:
            member = router.app.registry.members["w"]
            wanted = "alone, against no peer, it answers 503"
            await router.until(lambda: wanted in member.trouble)
            fake.answer_alone(200)
            router.app.registry.poke("w")
            await router.until(lambda: member.alive)


async def test_it_is_never_taken_for_a_plain_server() -> None:
    """A side that fails its check lists its model all the same, and would serve nothing whole."""
    async with FakeSglang("decode") as fake:
        fake.answer_alone(500)
        async with LoopbackRouter({"url": fake.url, "name": "w"}, wait=False) as router:
            member = router.app.registry.members["w"]
            await router.until(lambda: "alone, against no peer" in member.trouble)
            assert not member.alive


async def test_other_servers_are_not_sglang() -> None:
    info = {"/server_info": (200, {"version": "1", "model_path": "m"})}
    async with FakeOpenAI(routes=info) as fake:
        worker = {"url": fake.url, "name": "w", "engine": "sglang"}
        async with LoopbackRouter(worker, wait=False) as router:
            member = router.app.registry.members["w"]
            await router.until(lambda: "disaggregation_mode" in member.trouble)
        async with LoopbackRouter({"url": fake.url, "name": "w"}) as router:
            assert (await shown(router))["engine"] == "openai"


async def test_load_comes_from_its_metrics() -> None:
    async with FakeSglang("decode") as fake:
        fake.show_metrics(METRICS)
        async with LoopbackRouter({"url": fake.url, "name": "w"}) as router:
            assert (await shown(router))["running"] == 0
            router.app.registry.poke("w")
            member = router.app.registry.members["w"]
            await router.until(lambda: member.snapshot is not None and member.snapshot.running > 0)
            known = await shown(router)
            assert (known["running"], known["waiting"]) == (5, 5)
            assert known["kv_used_tokens"] == 25_000


async def test_without_metrics_it_lives_by_its_health() -> None:
    async with FakeSglang("decode") as fake:
        async with LoopbackRouter({"url": fake.url, "name": "w"}) as router:
            router.app.registry.poke("w")
            await fake.until(lambda f: f.requests[-1].path == "/health")
            fake.routes["/health"] = (503, {})
            member = router.app.registry.members["w"]
            router.app.registry.poke("w")
            await router.until(lambda: member.misses > 0)
            assert member.trouble == "GET /health answered 503"
