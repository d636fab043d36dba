"""The split flow over real sockets: the order of calls, what travels, and what is released."""

import asyncio
import json

import pytest

from router.testing.fake_native import (
    HANDOFF_HEADER,
    TRANSFER_BYTES,
    TRANSFER_MS,
    PrefillScript,
)
from router.testing.loopback_router import Split
from router.testing.raw_client import RawClient
from router.testing.script import Script
from splitserve import messages as m

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
STREAM = {**BODY, "stream": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["plain", "stream"])
async def test_prefill_then_decode_with_the_handoff_in_a_header(
    split: Split, body: dict[str, object]
) -> None:
    raw = json.dumps(body, indent=1).encode()
    answer = await split.router.client.post(
        CHAT, content=raw, headers={"content-type": "application/json", "x-other": "1"}
    )
    assert answer.status_code == 200
    assert answer.headers["x-splitserve-plan"] == "disaggregated"
    assert answer.headers["x-splitserve-workers"] == "prefill=p,decode=d"
    (asked,) = split.prefill.calls("/splitserve/")
    assert asked.path == "/splitserve/prefill" + CHAT
    (decoded,) = split.decode.calls()
    assert decoded.path == CHAT
    assert asked.body == decoded.body == raw
    assert asked.headers["x-other"] == decoded.headers["x-other"] == "1"
    assert HANDOFF_HEADER not in asked.headers
    assert split.prefill.calls("/v1/") == []
    assert split.decode.calls("/splitserve/") == []
    await split.router.idle()
    assert split.prefill.offers == {"offer-1": "ready"}  # read, so nothing to release
    assert split.commands(m.ReleaseKV) == [
        m.ReleaseKV(m.Handoff("offer-1", "p", "native", decoded.headers[HANDOFF_HEADER]), True)
    ]


async def test_record_of_a_split_request(split: Split) -> None:
    split.prefill.enqueue_prefill(PrefillScript(prompt_tokens=9, cached_tokens=4, prefill_ms=7.5))
    answer = await split.router.client.post(CHAT, json=STREAM)
    record = await split.router.record(answer)
    assert record["chosen"]["workers"] == {"prefill": "p", "decode": "d"}
    assert record["failures"] == []
    assert record["attempts"] == 1
    actual = record["actual"]
    assert actual["prefill_ms"] == 7.5
    assert actual["transfer_ms"] == TRANSFER_MS
    assert actual["transfer_bytes"] == TRANSFER_BYTES
    assert actual["output_tokens"] == 3
    assert actual["finish"] == "done"
    await split.router.idle()


async def test_decode_starts_while_prefill_still_runs(split: Split) -> None:
    split.prefill.enqueue_prefill(PrefillScript(stop_at="after_offer", silent=True))
    answer = await split.router.client.post(CHAT, json=STREAM)
    assert answer.status_code == 200
    assert answer.content.endswith(b"data: [DONE]\n\n")
    await split.router.idle()
    # The answer is whole, so nobody waits for the second line any more.
    await split.prefill.until(lambda fake: fake.requests[-1].outcome == "client_gone")


async def test_second_line_that_fails_after_the_first_token_changes_nothing(split: Split) -> None:
    gate = asyncio.Event()
    split.prefill.enqueue_prefill(PrefillScript(second_line_error=True, gate=gate))
    split.decode.enqueue(Script(silent_after_chunks=1))
    async with RawClient(split.router.url) as client:
        client.post(CHAT, json.dumps(STREAM).encode())
        await client.until(b"w0 ")
        gate.set()
        await split.router.until(lambda: isinstance(split.router.steps[-1][0], m.LegFailed))
        assert split.router.steps[-1][1] == []
        assert split.decode.calls()[0].outcome == "open"
    await split.router.idle()


async def test_second_line_that_fails_before_the_first_token_runs_whole(split: Split) -> None:
    gate = asyncio.Event()
    split.prefill.enqueue_prefill(PrefillScript(second_line_error=True, gate=gate))
    split.decode.enqueue(Script(silent=True))
    asked = asyncio.ensure_future(split.router.client.post(CHAT, json=STREAM))
    await split.decode.until(lambda _: len(split.decode.calls()) == 1)
    gate.set()
    answer = await asked
    assert answer.status_code == 200
    record = await split.router.record(answer)
    assert record["failures"] == ["attempt 1, prefill on p: HTTP 502: the prefill failed"]
    await split.router.idle()
    assert [call.outcome for call in split.decode.calls()] == ["client_gone", "done"]
    assert split.prefill.offers == {"offer-1": "released"}


async def test_prefill_that_fails_in_the_moment_of_its_offer_starts_no_decode(split: Split) -> None:
    # Both lines come in one read: StartDecode and what takes it back are ordered in one turn.
    split.prefill.enqueue_prefill(PrefillScript(second_line_error=True))
    answer = await split.router.client.post(CHAT, json=STREAM)
    assert answer.status_code == 200
    assert answer.headers["x-splitserve-plan"] == "aggregated"
    await split.router.idle()
    assert [HANDOFF_HEADER in call.headers for call in split.decode.calls()] == [False]
    assert split.prefill.offers == {"offer-1": "released"}


async def test_prefill_connection_is_used_again(split: Split) -> None:
    for _ in range(4):
        await split.router.client.post(CHAT, json=BODY)
    await split.router.idle()
    numbers = {call.connection for call in split.prefill.calls("/splitserve/")}
    assert len(numbers) == 1


@pytest.mark.parametrize(
    "line",
    [
        '{"handoff_id": "a", "attributes": "x\\r\\ny: z", "prompt_tokens": 1}',
        '{"handoff_id": "a", "attributes": "\\u00e9", "prompt_tokens": 1}',
        '{"handoff_id": 5, "attributes": "x", "prompt_tokens": 1}',
        '{"attributes": "x"}',
        "no json",
        "x" * 70_000,
    ],
    ids=["line break", "not ascii", "wrong type", "no id", "no json", "too long"],
)
async def test_offer_that_cannot_be_used_is_run_whole(split: Split, line: str) -> None:
    split.prefill.enqueue_prefill(PrefillScript(raw_line=line))
    answer = await split.router.client.post(CHAT, json=BODY)
    assert answer.status_code == 200
    assert answer.headers["x-splitserve-plan"] == "aggregated"
    record = await split.router.record(answer)
    assert record["attempts"] == 2
    assert "prefill on p" in record["failures"][0]
    await split.router.idle()


async def test_release_of_an_id_with_odd_characters(split: Split) -> None:
    offer = '{"handoff_id": "a/../b ?\\u00e9", "attributes": "x", "prompt_tokens": 1}'
    split.prefill.enqueue_prefill(PrefillScript(raw_line=offer))
    split.decode.break_handoffs("handoff_refused")
    answer = await split.router.client.post(CHAT, json=BODY)
    assert answer.status_code == 200
    await split.router.idle()
    assert split.prefill.offers == {"a%2F..%2Fb%20%3F%C3%A9": "released"}


@pytest.mark.parametrize(
    "value", ["nan", "-3", "inf", "x", ""], ids=["nan", "negative", "inf", "text", "empty"]
)
async def test_transfer_figures_that_are_none_are_ignored(split: Split, value: str) -> None:
    headers = {"x-splitserve-transfer-ms": value, "x-splitserve-transfer-bytes": value}
    split.decode.enqueue(Script(headers=headers))
    answer = await split.router.client.post(CHAT, json=STREAM)
    assert answer.status_code == 200
    record = await split.router.record(answer)
    assert record["actual"]["transfer_bytes"] == 0
    await split.router.idle()


@pytest.mark.parametrize(
    "more,why",
    [
        ({"prompt": ["a", "b"]}, "several prompts"),
        ({"prompt": ["a", [1]]}, "several prompts"),
        ({"prompt": [[1, 2], [3]]}, "several prompts"),
        ({"prompt": "a", "echo": True, "logprobs": 1}, "echo"),
    ],
)
async def test_requests_that_must_run_whole(split: Split, more: object, why: str) -> None:
    assert isinstance(more, dict)
    answer = await split.router.client.post("/v1/completions", json={"model": "m", **more})
    assert answer.status_code == 200, why
    assert answer.headers["x-splitserve-plan"] == "aggregated"
    await split.router.idle()


async def test_other_routes_run_whole(split: Split) -> None:
    answer = await split.router.client.post("/v1/embeddings", json={"model": "m", "input": "a"})
    assert answer.status_code == 404  # of the fake engine, which has no embeddings
    assert answer.headers["x-splitserve-plan"] == "aggregated"
    assert split.prefill.calls("/splitserve/") == []
    await split.router.idle()
