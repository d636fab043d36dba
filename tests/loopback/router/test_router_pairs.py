"""Pairs as people see them: in /admin/workers, in the decision record, in `splitserve explain`."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from router.api.pairs import SHOWN_PAIRS
from router.cli.commands import run
from router.testing.fake_native import FakeNative
from router.testing.fake_openai import FakeOpenAI
from router.testing.loopback_router import LoopbackRouter, Split
from splitserve import messages as m

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
ODD = "weights=other;layout=l;dtype=f16"
WHY = "KV differs in dtype (f32 / f16), weights (w / other)"


async def shown(router: LoopbackRouter) -> dict[str, dict[str, Any]]:
    workers = (await router.client.get("/admin/workers")).json()["workers"]
    return {worker["id"]: worker for worker in workers}


async def test_a_pair_that_fits(split: Split) -> None:
    workers = await shown(split.router)
    assert workers["p"]["pairs"] == [{"with": "d", "as": "prefill", "ok": True, "why_not": None}]
    assert workers["d"]["pairs"] == [{"with": "p", "as": "decode", "ok": True, "why_not": None}]
    for worker in workers.values():
        assert worker["engine"] == worker["connector"] == "native"
        assert worker["pairing"] == {"weights": "w", "layout": "l", "dtype": "f32"}
        assert worker["why_whole"] is None
        assert worker["more_pairs"] is False


async def test_a_refused_pair_says_why_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    async with FakeNative(role="prefill") as p, FakeNative(role="decode") as d:
        d.profile.pairing_key = ODD
        workers = {"url": p.url, "name": "p"}, {"url": d.url, "name": "d"}
        async with LoopbackRouter(*workers) as router:
            seen = await shown(router)
            assert seen["p"]["pairs"] == [
                {"with": "d", "as": "prefill", "ok": False, "why_not": WHY}
            ]
            answer = await router.client.post(CHAT, json=BODY, headers={"x-request-id": "mine"})
            assert answer.headers["x-splitserve-plan"] == "aggregated"
            record = await router.record(answer)
            [pair] = [c for c in record["candidates"] if c["plan"] == "disaggregated"]
            assert pair["workers"] == {"prefill": "p", "decode": "d"}
            assert (pair["feasible"], pair["why_not"]) == (False, WHY)
            command = ["explain", "mine", "--url", router.url]
            assert await asyncio.to_thread(run, command) == 0
            words = " ".join(capsys.readouterr().out.replace("│", " ").split())
            assert "KV differs in dtype" in words
            await router.idle()


async def test_a_quarantined_pair_says_for_how_long(split: Split) -> None:
    router = split.router
    until_s = router.app.dispatcher.clock() + 600
    router.app.dispatcher.tell(m.PairJudged("p", "d", "odd text", until_s))
    [pair] = (await shown(router))["p"]["pairs"]
    assert (pair["ok"], pair["why_not"]) == (False, "quarantined: odd text")
    assert 590 < pair["quarantine_s"] <= 600


async def test_roles_and_models_decide_which_pairs_there_are() -> None:
    async with FakeNative(role="auto") as a, FakeNative(role="decode") as d:
        async with FakeNative(role="prefill", models=("other",)) as o, FakeOpenAI() as plain:
            named = (("a", a), ("d", d), ("o", o), ("e", plain))
            workers = [{"url": fake.url, "name": name} for name, fake in named]
            async with LoopbackRouter(*workers) as router:
                seen = await shown(router)
    parts = {name: {(p["with"], p["as"]) for p in seen[name]["pairs"]} for name in seen}
    assert parts["a"] == {("d", "prefill"), ("e", "prefill"), ("e", "decode")}
    assert parts["d"] == {("a", "decode"), ("e", "decode")}
    assert parts["o"] == set()
    refused = {pair["why_not"] for pair in seen["e"]["pairs"]}
    assert refused == {"e (openai) has no way to move KV"}
    assert seen["e"]["why_whole"] == "openai has no way to move KV"


async def test_a_dialect_may_say_why_its_worker_runs_whole() -> None:
    async with FakeOpenAI() as plain:
        spec = {"url": plain.url, "name": "e", "model": "public", "engine_model": "m"}
        async with LoopbackRouter(spec) as router:
            backend: Any = router.app.registry.members["e"].backend
            backend._backend.why_whole = "it was started with --cont-batching off"
            seen = await shown(router)
            assert seen["e"]["why_whole"] == "it was started with --cont-batching off"
            assert seen["e"]["pairs"] == []


async def test_pairs_of_a_large_fleet_are_bounded(split: Split) -> None:
    known = split.router.app.scheduler.ledger.workers["d"].snapshot
    for number in range(100):
        other = m.WorkerSnapshot(
            f"x{number}", m.Role.DECODE, "native", ("m",), known.connector, known.pairing_key
        )
        split.router.app.dispatcher.tell(m.WorkerReported(other))
    seen = await shown(split.router)
    assert len(seen["p"]["pairs"]) == SHOWN_PAIRS
    assert seen["p"]["more_pairs"] is True
    assert len(seen["d"]["pairs"]) == 1
