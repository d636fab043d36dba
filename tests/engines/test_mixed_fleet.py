"""Four kinds of engine at once behind one router and one model name: every request is answered,
and for every request the router can say why it went where it went."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from router.testing.contract import CHAT, COMPLETIONS, answers
from router.testing.fake_openai import FakeOpenAI
from router.testing.loopback_router import LoopbackRouter
from router.testing.script import Script

PUBLIC = "smollm2"
OWN_NAME = "smollm2-135m"
REQUESTS = 200
AT_ONCE = 8
FORCED_EVERY = 10
TIMEOUT_S = 120.0
# Slower than the real ones on two cores, or it would be preferred for nearly all requests.
PLAIN = Script(header_delay_s=0.5, chunk_delay_s=0.1)
ENGINES = {"native": "native", "vllm": "vllm", "llama": "llama.cpp", "plain": "openai"}
TOPICS = ("rain", "the sea", "a small town", "music", "bread", "the moon", "trains")


@pytest.fixture
async def fleet(
    native_whole: str, vllm_whole: str, llama_whole: str
) -> AsyncIterator[LoopbackRouter]:
    async with FakeOpenAI(script=PLAIN, models=("gpt-none",)) as plain:
        urls = {"native": native_whole, "vllm": vllm_whole, "llama": llama_whole}
        named = [
            {"url": url, "name": name, "model": PUBLIC, "engine_model": OWN_NAME}
            for name, url in urls.items()
        ]
        named.append(
            {"url": plain.url, "name": "plain", "model": PUBLIC, "engine_model": "gpt-none"}
        )
        async with LoopbackRouter(*named, timeout_s=TIMEOUT_S, report_interval_s=5.0) as router:
            yield router
            await router.idle()


def request(number: int) -> tuple[str, dict[str, Any], dict[str, str]]:
    """Route, body and headers of a request: short and long, chat and text, whole and streamed."""
    words = f"{number}: tell me about {TOPICS[number % len(TOPICS)]}. " * (1 + number % 5)
    body: dict[str, Any] = {"model": PUBLIC, "max_tokens": 2 + number % 7}
    path = COMPLETIONS if number % 3 == 0 else CHAT
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": words}]
    else:
        body["prompt"] = words
    if number % 2:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    # Left to itself the router may find no use for the slowest: each gets its share on demand.
    turn, forced = divmod(number, FORCED_EVERY)
    names = list(ENGINES)
    return path, body, {} if forced else {"x-splitserve-worker": names[turn % len(names)]}


async def ask(router: LoopbackRouter, number: int) -> httpx.Response:
    path, body, headers = request(number)
    answer = await router.client.post(path, json=body, headers=headers)
    assert answer.status_code == 200, f"request {number}: {answer.text}"
    chunks = answers(answer)
    assert not any("error" in chunk for chunk in chunks)
    assert 1 <= chunks[-1]["usage"]["completion_tokens"] <= body["max_tokens"]
    return answer


def explain(record: dict[str, Any], served_by: str, forced: str | None) -> None:
    """Raise AssertionError unless the record says what was weighed and what came of it."""
    chosen, candidates = record["chosen"], record["candidates"]
    assert chosen in candidates
    assert chosen["workers"] == {"aggregated": served_by}
    assert chosen["feasible"]
    assert record["attempts"] == 1
    assert record["failures"] == []
    assert record["actual"]["finish"] == "done"
    assert all(each["predicted_ttft_ms"] > 0 for each in candidates if each["feasible"])
    assert all(each["why_not"] for each in candidates if not each["feasible"])
    weighed = {each["workers"].get("aggregated") for each in candidates}
    assert weighed >= ({forced} if forced else ENGINES.keys())


async def test_four_engines_serve_one_name(fleet: LoopbackRouter) -> None:
    members = fleet.app.registry.members
    engines = {name: each.snapshot.engine for name, each in members.items() if each.snapshot}
    assert engines == ENGINES
    numbers = itertools.count()
    served: Counter[str] = Counter()

    async def client() -> None:
        while (number := next(numbers)) < REQUESTS:
            answer = await ask(fleet, number)
            worker = answer.headers["x-splitserve-workers"].removeprefix("aggregated=")
            _, _, headers = request(number)
            explain(await fleet.record(answer), worker, headers.get("x-splitserve-worker"))
            served[worker] += 1

    async with asyncio.TaskGroup() as clients:
        for _ in range(AT_ONCE):
            clients.create_task(client())
    assert served.total() == REQUESTS
    least = REQUESTS // FORCED_EVERY // len(ENGINES)
    assert all(served[name] >= least for name in ENGINES), served
    listed = (await fleet.client.get("/v1/models")).json()["data"]
    assert [card["id"] for card in listed] == [PUBLIC]
    print(f"\nrequests by engine: {dict(served)}")  # noqa: T201
