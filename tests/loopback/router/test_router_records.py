"""Decision records and metrics: the figures are right and the labels are bounded."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from router.testing.fake_native import PrefillScript
from router.testing.fake_openai import FakeOpenAI
from router.testing.loopback_router import LoopbackRouter, Split
from router.testing.raw_client import RawClient
from router.testing.script import Script
from splitserve import messages as m

CHAT = "/v1/chat/completions"
PLAIN = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
STREAM = {**PLAIN, "stream": True}
WITH_USAGE = {**STREAM, "stream_options": {"include_usage": True}}

Series = tuple[str, tuple[tuple[str, str], ...]]
Samples = dict[Series, float]


@pytest.fixture
async def engine() -> AsyncIterator[FakeOpenAI]:
    async with FakeOpenAI() as fake:
        yield fake


@pytest.fixture
async def router(engine: FakeOpenAI) -> AsyncIterator[LoopbackRouter]:
    async with LoopbackRouter({"url": engine.url, "name": "e"}) as running:
        yield running


async def scrape(router: LoopbackRouter) -> Samples:
    answer = await router.client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def ended(plan: str, finish: str) -> Series:
    labels = {"service_class": "interactive", "plan": plan, "finish": finish}
    return "splitserve_requests_total", tuple(sorted(labels.items()))


def of_class(name: str) -> Series:
    return name, (("service_class", "interactive"),)


# --- records --------------------------------------------------------------------------------------


async def test_record_has_every_field_of_the_contract(router: LoopbackRouter) -> None:
    record = await router.record(await router.client.post(CHAT, json=WITH_USAGE))
    assert record.keys() >= {
        "request_id", "time", "class", "targets", "prompt_tokens", "cached_tokens", "candidates",
        "chosen", "released_ms", "actual",
    }  # fmt: skip
    assert record["candidates"][0].keys() == {
        "plan", "workers", "predicted_ttft_ms", "predicted_tpot_ms", "transfer_ms", "feasible",
        "why_not",
    }  # fmt: skip
    assert record["actual"].keys() >= {
        "ttft_ms", "tpot_ms", "transfer_ms", "output_tokens", "finish", "met_targets",
    }  # fmt: skip


CACHED = {"prompt_tokens_details": {"cached_tokens": 3}}


@pytest.mark.parametrize("body", [PLAIN, WITH_USAGE], ids=["plain", "stream"])
@pytest.mark.parametrize("compact", [False, True], ids=["spaced JSON", "compact JSON"])
async def test_counts_are_the_engines_own(
    engine: FakeOpenAI, router: LoopbackRouter, body: dict[str, object], compact: bool
) -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 4, "total_tokens": 11, **CACHED}
    separators = (",", ":") if compact else (", ", ": ")
    answer = json.dumps({"choices": [], "usage": usage}, separators=separators)
    if body is WITH_USAGE:
        token = json.dumps({"choices": [{"delta": {"content": "a"}}], "usage": None})
        answer = f"data: {token}\n\ndata: {answer}\n\ndata: [DONE]\n\n"
    kind = "text/event-stream" if body is WITH_USAGE else "application/json"
    head = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {len(answer)}\r\n\r\n"
    engine.enqueue(Script(raw=head + answer))
    record = await router.record(await router.client.post(CHAT, json=body))
    assert record["prompt_tokens"] == 7
    assert record["cached_tokens"] == 3
    assert record["actual"]["output_tokens"] == 4


async def test_a_plain_answer_has_no_ttft(router: LoopbackRouter) -> None:
    record = await router.record(await router.client.post(CHAT, json=PLAIN))
    assert record["actual"]["ttft_ms"] is None
    assert record["actual"]["tpot_ms"] is None
    assert record["actual"]["output_tokens"] == 5
    assert record["actual"]["met_targets"] is True


async def test_ttft_and_tpot_of_a_stream(engine: FakeOpenAI, router: LoopbackRouter) -> None:
    engine.enqueue(Script(first_chunk_delay_s=0.05, chunk_delay_s=0.02))
    record = await router.record(await router.client.post(CHAT, json=WITH_USAGE))
    actual = record["actual"]
    assert 45 <= actual["ttft_ms"] < 1000
    # 5 tokens, and a pause after each of them and after the usage that follows
    assert 18 <= actual["tpot_ms"] < 400
    assert record["released_ms"] < actual["ttft_ms"]


DELTA = {"role": "assistant", "content": ""}
ROLE = {"choices": [{"index": 0, "delta": DELTA, "finish_reason": None}]}
EMPTY: dict[str, object] = {"choices": []}


@pytest.mark.parametrize("first", [ROLE, EMPTY], ids=["role only", "no choices"])
async def test_first_chunk_without_a_token_is_no_first_token(
    router: LoopbackRouter, engine: FakeOpenAI, first: dict[str, object]
) -> None:
    engine.enqueue(Script(merge=first, silent_after_chunks=1))
    async with RawClient(router.url) as client:
        client.post(CHAT, json.dumps(STREAM).encode())
        await client.until(b"data: ")
        assert not any(isinstance(event, m.FirstToken) for event, _ in router.steps)
    await router.idle()
    assert router.latest()["actual"]["ttft_ms"] is None


async def test_record_of_a_running_request(router: LoopbackRouter, engine: FakeOpenAI) -> None:
    engine.enqueue(Script(silent_after_chunks=1))
    async with RawClient(router.url) as client:
        client.post(CHAT, json.dumps(STREAM).encode(), ("x-request-id: mine",))
        await client.until(b"w0 ")
        record = (await router.client.get("/admin/requests/mine")).json()
        assert record["actual"]["finish"] == "running"
    await router.idle()
    record = (await router.client.get("/admin/requests/mine")).json()
    assert record["actual"]["finish"] == "cancelled"


async def test_decisions_are_the_newest_first(router: LoopbackRouter) -> None:
    for number in range(3):
        await router.client.post(CHAT, json=PLAIN, headers={"x-request-id": str(number)})
    shown = (await router.client.get("/admin/decisions?limit=2")).json()["decisions"]
    assert [record["client_request_id"] for record in shown] == ["2", "1"]
    assert (await router.client.get("/admin/decisions?limit=0")).status_code == 400
    assert (await router.client.get("/admin/requests/none")).status_code == 404


async def test_missed_targets(router: LoopbackRouter, engine: FakeOpenAI) -> None:
    slow = {"x-slo-ttft-ms": "0.001"}
    record = await router.record(await router.client.post(CHAT, json=STREAM, headers=slow))
    assert record["actual"]["met_targets"] is False
    samples = await scrape(router)
    assert samples[of_class("splitserve_requests_met_targets_total")] == 0


# --- metrics --------------------------------------------------------------------------------------


async def test_counters_count(split: Split) -> None:
    router = split.router
    for _ in range(2):
        await router.client.post(CHAT, json=WITH_USAGE)
    split.prefill.enqueue_prefill(PrefillScript(status=500))
    await router.client.post(CHAT, json=PLAIN)
    await router.client.post(CHAT, json={**PLAIN, "model": "none"})
    await router.idle()
    samples = await scrape(router)
    assert samples[ended("disaggregated", "done")] == 2
    assert samples[ended("aggregated", "done")] == 1
    assert samples[ended("none", "unknown_model")] == 1
    assert samples["splitserve_retries_total", ()] == 1
    assert samples["splitserve_handoff_bytes_total", ()] == 2 * 4096
    assert samples[of_class("splitserve_ttft_seconds_count")] == 2
    assert samples[of_class("splitserve_tpot_seconds_count")] == 2
    assert samples[of_class("splitserve_queue_seconds_count")] == 4
    assert samples["splitserve_live_requests", ()] == 0
    assert samples["splitserve_worker_in_flight", (("worker", "p"),)] == 0


async def test_gauges_show_what_runs(router: LoopbackRouter, engine: FakeOpenAI) -> None:
    engine.enqueue(Script(silent=True))
    asked = asyncio.ensure_future(router.client.post(CHAT, json=PLAIN))
    await engine.until(lambda f: f.requests[-1].method == "POST")
    samples = await scrape(router)
    assert samples["splitserve_live_requests", ()] == 1
    assert samples["splitserve_queued_requests", ()] == 0
    assert samples["splitserve_worker_in_flight", (("worker", "e"),)] == 1
    asked.cancel()
    await router.idle()
    samples = await scrape(router)
    assert samples[ended("aggregated", "cancelled")] == 1


async def test_no_word_of_a_client_becomes_a_label(router: LoopbackRouter) -> None:
    before = {key[0] for key in await scrape(router)}
    evil = "evil-word"
    for headers, body in (
        ({}, {**PLAIN, "model": evil}),
        ({"x-slo-class": evil}, PLAIN),
        ({"x-session-id": evil, "x-request-id": evil}, {**PLAIN, "service_tier": evil}),
        ({"x-splitserve-worker": evil}, PLAIN),
        ({"x-splitserve-plan": evil}, PLAIN),
    ):
        await router.client.post(CHAT, json=body, headers=headers)
    await router.client.post(f"/v1/{evil}", json=PLAIN)
    samples = await scrape(router)
    assert evil not in str(samples)
    assert {key[0] for key in samples} == before | {
        key[0] for key in samples if key[0].startswith("splitserve_")
    }


async def test_worker_that_left_leaves_the_gauges(router: LoopbackRouter) -> None:
    assert ("splitserve_worker_in_flight", (("worker", "e"),)) in await scrape(router)
    await router.client.delete("/admin/workers/e")
    assert ("splitserve_worker_in_flight", (("worker", "e"),)) not in await scrape(router)
