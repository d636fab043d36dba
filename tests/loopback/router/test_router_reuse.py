"""Honest reuse over real sockets: what was computed again is shown, counted and ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from router import registry
from router.backends.base import Target
from router.backends.native import NativeBackend
from router.cli.commands import run
from router.testing.fake_native import FakeNative
from router.testing.loopback_router import LoopbackRouter, Split
from router.upstream import Upstream
from router.usage import TokenCounts
from router.wire import Deadlines
from splitserve.messages import Handoff

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


class Recomputing(NativeBackend):
    """A dialect whose engine computes again what a test says."""

    def __init__(
        self, target: Target, upstream: Upstream, deadlines: Deadlines, tokens: list[int | None]
    ) -> None:
        super().__init__(target, upstream, deadlines)
        self._tokens = tokens

    def recomputed(self, handoff: Handoff, counts: TokenCounts) -> int | None:
        return self._tokens.pop(0)


class Dialect:
    engine = "native"

    def __init__(self, tokens: list[int | None]) -> None:
        self.tokens = tokens

    def __call__(self, target: Target, upstream: Upstream, deadlines: Deadlines) -> Recomputing:
        return Recomputing(target, upstream, deadlines, self.tokens)


@pytest.fixture
def tokens() -> list[int | None]:
    """What the next decode legs compute again."""
    return []


@pytest.fixture
async def split(tokens: list[int | None], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Split]:
    monkeypatch.setattr(registry, "DIALECTS", (Dialect(tokens),))
    async with FakeNative(role="prefill") as p, FakeNative(role="decode") as d:
        async with LoopbackRouter({"url": p.url, "name": "p"}, {"url": d.url, "name": "d"}) as r:
            yield Split(r, p, d)


async def test_what_was_computed_again_is_in_record_metrics_and_explain(
    split: Split, tokens: list[int | None], capsys: pytest.CaptureFixture[str]
) -> None:
    router = split.router
    tokens += [5]
    answer = await router.client.post(CHAT, json=BODY, headers={"x-request-id": "mine"})
    record = await router.record(answer)
    assert record["actual"]["recomputed_tokens"] == 5
    [latest] = (await router.client.get("/admin/decisions")).json()["decisions"]
    assert latest["actual"]["recomputed_tokens"] == 5
    text = (await router.client.get("/metrics")).text
    assert "splitserve_handoff_recomputes_total 1.0" in text
    assert "splitserve_handoff_recomputed_tokens_total 5.0" in text
    status = await asyncio.to_thread(run, ["explain", "mine", "--url", router.url])
    assert status == 0
    assert "computed again: 5 tokens" in " ".join(capsys.readouterr().out.split())
    await router.idle()


@pytest.mark.parametrize("nothing", [0, None])
async def test_nothing_computed_again_is_not_shown(
    split: Split, tokens: list[int | None], nothing: int | None
) -> None:
    tokens += [nothing]
    record = await split.router.record(await split.router.client.post(CHAT, json=BODY))
    assert record["actual"]["recomputed_tokens"] == nothing
    text = (await split.router.client.get("/metrics")).text
    assert "splitserve_handoff_recomputes_total 0.0" in text
    await split.router.idle()


async def test_what_only_counters_show_quarantines_too(
    split: Split, tokens: list[int | None]
) -> None:
    client = split.router.client
    tokens += [None, None, None]
    for _ in range(3):
        answer = await client.post(CHAT, json=BODY)
        assert answer.headers["x-splitserve-plan"] == "disaggregated"
        split.router.app.dispatcher.recomputed("d", 5)
    answer = await client.post(CHAT, json=BODY)
    assert answer.headers["x-splitserve-plan"] == "aggregated"
    text = (await client.get("/metrics")).text
    assert "splitserve_handoff_recomputed_tokens_total 15.0" in text
    await split.router.idle()


async def test_three_in_a_row_quarantine_the_pair(
    split: Split, tokens: list[int | None], caplog: pytest.LogCaptureFixture
) -> None:
    client = split.router.client
    tokens += [5, 5, 0, 5, 6, 7]
    for _ in range(6):
        answer = await client.post(CHAT, json=BODY)
        assert answer.headers["x-splitserve-plan"] == "disaggregated"
    answer = await client.post(CHAT, json=BODY)
    assert answer.headers["x-splitserve-plan"] == "aggregated"
    record = await split.router.record(answer)
    why = [c["why_not"] for c in record["candidates"] if c["plan"] == "disaggregated"]
    assert why == [
        "quarantined: hand-offs were computed again on d 3 times in a row (18 prompt tokens)"
    ]
    assert "p -> d: 5 prompt tokens were handed over and computed again" in caplog.text
    assert "splitserve_pairs_quarantined 1.0" in (await client.get("/metrics")).text
    await split.router.idle()
