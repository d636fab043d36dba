"""The shadow check over real sockets: what is asked again, when, and what follows."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from router.testing.fake_native import HANDOFF_HEADER, FakeNative
from router.testing.loopback_router import LoopbackRouter, Split
from router.testing.raw_client import RawClient
from router.testing.script import Script
from splitserve import messages as m

CHAT = "/v1/chat/completions"
SECRET = "the word nobody may log"
PLAIN = {
    "model": "m",
    "messages": [{"role": "user", "content": SECRET}],
    "max_tokens": 4,
    "temperature": 0,
}
STREAM = {**PLAIN, "stream": True}
WARM = {**PLAIN, "temperature": 1}
OTHER = Script(chunk_bytes=7)  # an answer with another text
AT_JOIN = {"share": 0.0, "at_join": True}


@pytest.fixture
def tolerated() -> list[str]:
    return ["no hand-offs for"]


@contextlib.asynccontextmanager
async def pair(engine: str = "native", **settings: Any) -> AsyncIterator[Split]:
    async with FakeNative(role="prefill") as p, FakeNative(role="decode") as d:
        d.profile.engine = engine
        workers = {"url": p.url, "name": "p"}, {"url": d.url, "name": "d"}
        async with LoopbackRouter(*workers, shadow_check={**AT_JOIN, **settings}) as router:
            yield Split(router, p, d)


def checks(split: Split, result: str) -> float:
    registry = split.router.app.dispatcher.metrics.registry
    return registry.get_sample_value("splitserve_shadow_checks_total", {"result": result}) or 0


async def checked(split: Split, result: str, times: int = 1) -> None:
    await split.router.until(lambda: checks(split, result) == times)
    await split.router.idle()


def judgements(split: Split) -> list[m.PairJudged]:
    return [event for event, _ in split.router.steps if isinstance(event, m.PairJudged)]


async def plan_of(split: Split, body: dict[str, Any] = WARM) -> str:
    answer = await split.router.client.post(CHAT, json=body)
    assert answer.status_code == 200
    return str(answer.headers["x-splitserve-plan"])


@pytest.mark.parametrize("body", [PLAIN, STREAM], ids=["plain", "stream"])
async def test_first_greedy_answer_is_computed_again_whole(body: dict[str, Any]) -> None:
    async with pair() as split:
        assert await plan_of(split, body) == "disaggregated"
        await checked(split, "agreed")
        served, again = split.decode.calls()
        assert HANDOFF_HEADER in served.headers
        assert HANDOFF_HEADER not in again.headers
        assert again.headers["x-splitserve-priority"] == "10"
        assert again.headers["x-request-id"] != served.headers["x-request-id"]
        asked = json.loads(again.body)
        assert asked.pop("cache_salt")
        assert asked == body
        assert await plan_of(split, body) == "disaggregated"
        await split.router.idle()
        assert len(split.decode.calls()) == 3  # once a pair is checked, its share decides
        assert judgements(split) == []


async def test_other_answers_are_not_checked_and_the_pair_stays_due() -> None:
    async with pair() as split:
        assert await plan_of(split, WARM) == "disaggregated"
        assert await plan_of(split, {**PLAIN, "max_tokens": 9999}) == "disaggregated"
        await split.router.idle()
        assert len(split.decode.calls()) == 2
        assert await plan_of(split, PLAIN) == "disaggregated"
        await checked(split, "agreed")


@pytest.mark.parametrize("body", [PLAIN, STREAM], ids=["plain", "stream"])
async def test_a_pair_whose_text_differs_is_quarantined(
    body: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    async with pair() as split:
        router = split.router
        split.decode.enqueue(OTHER)
        assert await plan_of(split, body) == "disaggregated"
        await checked(split, "differed")
        salts = [json.loads(call.body)["cache_salt"] for call in split.decode.calls()[1:]]
        assert len(set(salts)) == 2  # confirmed by a second answer of its own
        [judged] = judgements(split)
        assert (judged.prefill_worker, judged.decode_worker) == ("p", "d")
        [said] = [r for r in caplog.records if r.levelno == logging.ERROR]
        assert "p -> d: no hand-offs for 600 s" in said.getMessage()
        assert SECRET not in caplog.text

        answer = await router.client.post(CHAT, json=WARM)
        assert answer.headers["x-splitserve-plan"] == "aggregated"
        record = await router.record(answer)
        why = [c["why_not"] for c in record["candidates"] if c["plan"] == "disaggregated"]
        assert why == [f"quarantined: {judged.reason}"]
        assert "splitserve_pairs_quarantined 1.0" in (await router.client.get("/metrics")).text


async def test_a_lifted_pair_is_checked_again_when_it_serves() -> None:
    async with pair() as split:
        client = split.router.client
        split.decode.enqueue(OTHER)
        await plan_of(split, PLAIN)
        await checked(split, "differed")
        assert (await client.delete("/admin/quarantines/p/d")).json() == {"lifted": True}
        assert (await client.delete("/admin/quarantines/p/d")).status_code == 404
        assert await plan_of(split, PLAIN) == "disaggregated"
        await checked(split, "agreed")
        assert "splitserve_pairs_quarantined 0.0" in (await client.get("/metrics")).text


async def test_a_worker_that_never_says_the_same_proves_nothing() -> None:
    async with pair() as split:
        split.decode.enqueue(Script(), Script(chunk_bytes=7), Script(chunk_bytes=9))
        await plan_of(split, PLAIN)
        await checked(split, "unclear")
        assert judgements(split) == []


async def test_a_worker_that_does_not_answer_alone_proves_nothing() -> None:
    async with pair() as split:
        split.decode.enqueue(Script(), Script(status=500))
        await plan_of(split, PLAIN)
        await checked(split, "failed")
        assert judgements(split) == []
        assert await plan_of(split) == "disaggregated"


async def test_unlike_engines_may_part_after_the_first_word() -> None:
    async with pair(engine="other") as split:
        split.decode.enqueue(Script(chunks=2))  # it says less: the first word is the same
        await plan_of(split, PLAIN)
        await checked(split, "agreed")


@pytest.mark.parametrize("engine,exact", [("other", True), ("native", False)])
async def test_where_texts_may_part_one_difference_is_no_proof(engine: str, exact: bool) -> None:
    async with pair(engine=engine, exact=exact) as split:
        for number in range(1, 4):
            assert await plan_of(split) == "disaggregated"
            split.decode.enqueue(OTHER)
            await plan_of(split, PLAIN)
            await checked(split, "differed", number)
        assert len(judgements(split)) == 1
        assert await plan_of(split) == "aggregated"


async def test_the_check_waits_for_an_idle_moment() -> None:
    async with pair() as split:
        router = split.router
        split.decode.enqueue(Script(silent_after_chunks=1))
        async with RawClient(router.url) as client:
            client.post(CHAT, json.dumps({**WARM, "stream": True}).encode())
            await client.until(b"w0 ")
            await plan_of(split, PLAIN)
            await plan_of(split, WARM)
            assert len(split.decode.calls()) == 3
        await checked(split, "agreed")
        assert len(split.decode.calls()) == 4


async def test_a_client_ends_the_check_at_once_and_it_is_done_later() -> None:
    async with pair() as split:
        split.decode.enqueue(Script(), Script(silent=True))
        await plan_of(split, PLAIN)
        await split.decode.until(lambda _: len(split.decode.calls()) == 2)
        assert await plan_of(split, WARM) == "disaggregated"
        await checked(split, "agreed")
        outcomes = [call.outcome for call in split.decode.calls()]
        assert outcomes == ["done", "client_gone", "done", "done"]


async def test_a_worker_that_leaves_ends_its_check() -> None:
    async with pair() as split:
        split.decode.enqueue(Script(), Script(silent=True))
        await plan_of(split, PLAIN)
        await split.decode.until(lambda _: len(split.decode.calls()) == 2)
        await split.router.client.delete("/admin/workers/d")
        await checked(split, "skipped")
        await split.decode.until(lambda _: split.decode.calls()[1].outcome == "client_gone")


async def test_one_check_at_a_time() -> None:
    async with pair(share=1.0) as split:
        split.decode.enqueue(Script(), Script(silent=True), Script())
        await plan_of(split, PLAIN)
        await split.decode.until(lambda _: len(split.decode.calls()) == 2)
        await plan_of(split, PLAIN)
        await split.router.until(lambda: checks(split, "skipped") == 1)
        await checked(split, "agreed")


async def test_shutdown_ends_a_check() -> None:
    async with pair() as split:
        split.decode.enqueue(Script(), Script(silent=True))
        await plan_of(split, PLAIN)
        await split.decode.until(lambda _: len(split.decode.calls()) == 2)
        began_s = asyncio.get_running_loop().time()
        await split.router.app.pair_watch.stop()
        assert asyncio.get_running_loop().time() - began_s < 1
        await split.decode.until(lambda _: split.decode.calls()[1].outcome == "client_gone")
        await split.router.idle()


async def test_switched_off(split: Split) -> None:
    assert await plan_of(split, PLAIN) == "disaggregated"
    await split.router.idle()
    assert len(split.decode.calls()) == 1
