"""What the router adds to requests that vLLM answers whole: salts and priorities."""

import json
from typing import Any

from router.testing.fake_vllm import FakeVllm
from router.testing.loopback_router import LoopbackRouter

COMPLETIONS = "/v1/completions"
BODY = {"model": "m", "prompt": "In the beginning there was a prompt.", "max_tokens": 3}


async def test_tenants_have_salts_and_no_priorities() -> None:
    tenants = [{"name": "alice", "key_env": "A"}, {"name": "bob", "key_env": "B"}]
    async with FakeVllm() as one:
        entry = {"url": one.url, "name": "one"}
        environ = {"A": "key-a", "B": "key-b"}
        async with LoopbackRouter(entry, environ=environ, tenants=tenants) as router:
            for key, salt in (("key-a", None), ("key-a", None), ("key-b", None), ("key-a", "own")):
                body = {**BODY, "priority": -5} | ({"cache_salt": salt} if salt else {})
                headers = {"authorization": f"Bearer {key}"}
                answer = await router.client.post(COMPLETIONS, json=body, headers=headers)
                assert answer.status_code == 200
        bodies = [json.loads(call.body) for call in one.calls()]
        salts = [body["cache_salt"] for body in bodies]
        assert salts[0] == salts[1]
        assert len(set(salts)) == 3
        assert all("alice" not in salt and salt != "own" for salt in salts)
        assert not any("priority" in body for body in bodies)


async def test_batch_requests_go_behind_others_until_the_engine_says_no() -> None:
    classes = {"interactive": {"ttft_ms": 60000}, "batch": {}}
    async with FakeVllm() as one:
        entry = {"url": one.url, "name": "one"}
        settings: dict[str, Any] = {"classes": classes, "default_class": "interactive"}
        async with LoopbackRouter(entry, **settings) as router:
            for name in ("interactive", "batch", "batch"):
                one.board.refuses_priority = len(one.calls()) > 1
                headers = {"x-slo-class": name}
                answer = await router.client.post(COMPLETIONS, json=BODY, headers=headers)
                assert answer.status_code == 200, answer.text
        asked = [json.loads(call.body).get("priority") for call in one.calls()]
        assert asked == [None, 10, 10, None]
