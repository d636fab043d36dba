"""vLLM behind the router: pull, push and files, and what a wrong or a late hand-off leads to."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx
import pytest

from router.backends.vllm import VllmBackend
from router.testing.fake_vllm import ConnectorName, FakeVllm
from router.testing.loopback_router import LoopbackRouter
from router.testing.raw_client import RawClient
from router.testing.script import Script
from router.testing.vllm_kv import Fabric
from splitserve.messages import HandoffReady, LegFailed

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PROMPT = "In the beginning there was a prompt of some length. " * 4
BODY = {"model": "m", "prompt": PROMPT, "max_tokens": 3}
STREAM = {**BODY, "stream": True, "stream_options": {"include_usage": True}}


class Clock:
    """A clock that stands still until it is told."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(frozen=True, slots=True)
class Pair:
    """A router in front of two vLLM workers `p` and `d`, all three on one clock."""

    router: LoopbackRouter
    p: FakeVllm
    d: FakeVllm
    clock: Clock

    async def poll(self) -> None:
        """Let the router read both workers' counters once."""
        registry, seen = self.router.app.registry, len(self.router.steps)
        registry.poke("d")
        registry.poke("p")
        await self.router.until(lambda: len(self.router.steps) >= seen + 2)

    async def metric(self, name: str) -> float:
        """One of the router's own metrics."""
        text = (await self.router.client.get("/metrics")).text
        (line,) = [each for each in text.splitlines() if each.startswith(f"{name} ")]
        return float(line.partition(" ")[2])


@contextlib.asynccontextmanager
async def pair(connector: ConnectorName, **more: object) -> AsyncIterator[Pair]:
    clock, fabric = Clock(), Fabric()
    recomputes = bool(more.get("recomputes", True))
    async with (
        FakeVllm(connector, fabric, clock=clock, recomputes=recomputes) as p,
        FakeVllm(connector, fabric, clock=clock, recomputes=recomputes) as d,
    ):
        entries = [
            {"url": worker.url, "name": name, "role": role, "kv": worker.settings}
            for worker, name, role in ((p, "p", "prefill"), (d, "d", "decode"))
        ]
        async with LoopbackRouter(*entries) as router:
            for backend in router.app.dispatcher.backends.values():
                assert isinstance(backend, VllmBackend)
                backend._clock = clock
            yield Pair(router, p, d, clock)
            await router.idle()


async def direct(worker: FakeVllm, body: dict[str, object]) -> dict[str, object]:
    """A worker's own answer to a body, without the router."""
    async with httpx.AsyncClient(base_url=worker.url) as client:
        answer: dict[str, object] = (await client.post(COMPLETIONS, json=body)).json()
    return answer


def text_of(answer: httpx.Response) -> str:
    return str(answer.json()["choices"][0]["text"])


async def test_pull_sends_the_object_of_the_prefill_worker_verbatim() -> None:
    async with pair("nixl-pull") as two:
        body = {**STREAM, "n": 1, "min_tokens": 2, "logprobs": 3, "max_completion_tokens": 9}
        answer = await two.router.client.post(COMPLETIONS, json=body)
        assert answer.status_code == 200
        assert answer.headers["x-splitserve-plan"] == "disaggregated"
        (first,), (second,) = two.p.calls(), two.d.calls()
        asked = json.loads(first.body)
        assert asked == {
            "model": "m",
            "prompt": PROMPT,
            "max_tokens": 1,
            "max_completion_tokens": 1,
            "stream": False,
            "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False},
        }
        decoded = json.loads(second.body)
        offer = decoded.pop("kv_transfer_params")
        assert decoded == body
        assert offer["remote_engine_id"] == two.p.kv.engine_id
        assert offer["remote_blocks_expiry_time"] is None
        assert offer["remote_prefill_cached_tokens"] == 0
        assert first.headers["x-request-id"] == second.headers["x-request-id"]
        assert two.p.kv.leases == {}


async def test_a_clients_own_handover_fields_go_nowhere() -> None:
    async with pair("nixl-pull") as two:
        evil = {"do_remote_prefill": True}
        text = json.dumps({**BODY, "kv_transfer_params": evil}).replace("_params", "\\u005fparams")
        text = text[:-1] + ', "vllm_xargs": {"kv_transfer_params": "x", "a": 1}, "id_slot": 3}'
        for forced in ("aggregated", "disaggregated"):
            headers = {"content-type": "application/json", "x-splitserve-plan": forced}
            answer = await two.router.client.post(COMPLETIONS, content=text, headers=headers)
            assert answer.status_code == 200
        assert not two.p.dead
        assert not two.d.dead
        whole = json.loads(two.d.calls()[0].body)
        assert whole == {**BODY, "vllm_xargs": {"a": 1}}


@pytest.mark.parametrize("missing", ["remote_block_ids", "remote_host", "tp_size", "all"])
async def test_an_incomplete_object_is_never_sent_on(missing: str) -> None:
    async with pair("nixl-pull") as two:

        def spoilt(offer: dict[str, object]) -> dict[str, object] | None:
            return None if missing == "all" else {**offer, missing: None}

        two.p.board.spoil = spoilt
        answer = await two.router.client.post(COMPLETIONS, json=BODY)
        assert answer.status_code == 200
        assert answer.headers["x-splitserve-plan"] == "aggregated"
        record = await two.router.record(answer)
        assert "kv_transfer_params" in record["failures"][0]
        assert not two.d.dead
        assert ["kv_transfer_params" in json.loads(c.body) for c in two.d.calls()] == [False]


async def test_a_late_hand_off_is_prefilled_again() -> None:
    async with pair("nixl-pull") as two:
        await two.router.client.post(COMPLETIONS, json=BODY)  # the two have met
        expected = await direct(two.d, BODY)
        backend = two.router.app.dispatcher.backends["d"]
        send, waits = backend.decode, asyncio.Event()

        async def delayed(*args: object) -> object:
            if not waits.is_set():
                waits.set()
                two.clock.now_s += 20.1  # a lease of 30 s, less 10
            return await send(*args)  # type: ignore[arg-type]

        backend.decode = delayed  # type: ignore[method-assign,assignment]
        answer = await two.router.client.post(COMPLETIONS, json=BODY)
        assert answer.status_code == 200
        assert answer.json()["choices"] == expected["choices"]
        record = await two.router.record(answer)
        assert record["attempts"] == 2
        assert "20.1 s old and its lease is 30 s" in record["failures"][0]
        failed = [e for e, _ in two.router.steps if isinstance(e, LegFailed)]
        assert [each.failure.value for each in failed] == ["handoff"]
        assert two.p.kv.counters.late_reads == 0


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["plain", "stream"])
async def test_workers_that_meet_for_longer_than_a_lease_are_not_believed(
    body: dict[str, object],
) -> None:
    async with pair("nixl-pull") as two:
        two.d.kv.gate = asyncio.Event()
        asked = asyncio.ensure_future(two.router.client.post(COMPLETIONS, json=body))
        await two.d.until(lambda _: two.d.kv.at_gate == 1)
        two.clock.now_s += 31.0  # nobody renews the lease of two that have not met
        two.d.kv.gate.set()
        answer = await asked
        assert answer.status_code == 200
        assert answer.headers["x-splitserve-plan"] == "aggregated"
        assert "." * 4 not in answer.text  # the mark of a wrong text
        assert two.p.kv.counters.late_reads == 1
        await two.poll()  # its warning names the counter
        again = await two.router.client.post(COMPLETIONS, json=body)
        assert again.headers["x-splitserve-plan"] == "disaggregated"


async def test_a_lease_that_is_renewed_may_last_as_long_as_it_likes() -> None:
    async with pair("nixl-pull") as two:
        await two.router.client.post(COMPLETIONS, json=BODY)
        two.d.kv.gate = asyncio.Event()
        asked = asyncio.ensure_future(two.router.client.post(COMPLETIONS, json=BODY))
        await two.d.until(lambda _: two.d.kv.at_gate == 1)
        two.clock.now_s += 300.0
        two.d.kv.gate.set()
        answer = await asked
        assert answer.headers["x-splitserve-plan"] == "disaggregated"
        assert two.p.kv.counters.late_reads == 0


async def test_push_sends_both_legs_at_once() -> None:
    async with pair("nixl-push") as two:
        two.p.board.prefill_gate = asyncio.Event()
        asked = asyncio.ensure_future(two.router.client.post(COMPLETIONS, json=STREAM))
        await two.d.until(lambda _: len(two.d.calls()) == 1)
        assert [len(two.p.calls()), two.p.calls()[0].outcome] == [1, "open"]
        two.p.board.prefill_gate.set()
        answer = await asked
        assert answer.headers["x-splitserve-plan"] == "disaggregated"
        params = json.loads(two.d.calls()[0].body)["kv_transfer_params"]
        request_id = two.p.calls()[0].headers["x-request-id"]
        assert params == {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": two.p.kv.engine_id,
            "remote_host": "127.0.0.1",
            "remote_port": two.p.kv.port,
            "tp_size": 1,
            "pp_size": 1,
            "remote_request_id": request_id,
        }
        assert two.d.calls()[0].headers["x-request-id"] == request_id


async def test_push_of_a_prefill_that_fails_ends_the_decode_leg_at_once() -> None:
    async with pair("nixl-push") as two:
        two.p.board.prefill_gate = gate = asyncio.Event()
        asked = asyncio.ensure_future(two.router.client.post(COMPLETIONS, json=STREAM))
        await two.d.until(lambda _: len(two.d.calls()) == 1)
        two.p.board.spoil = lambda offer: None
        gate.set()
        answer = await asked
        assert answer.status_code == 200
        assert answer.headers["x-splitserve-plan"] == "aggregated"
        await two.d.until(lambda _: two.d.calls()[0].outcome == "client_gone")


async def test_push_learns_of_wrong_settings_from_the_prefill_answer() -> None:
    async with pair("nixl-push") as two:
        two.p.board.spoil = lambda offer: {**offer, "remote_engine_id": "another"}
        answer = await two.router.client.post(COMPLETIONS, json=BODY)
        assert answer.headers["x-splitserve-plan"] == "aggregated"
        record = await two.router.record(answer)
        assert "correct engine_id and side_channel" in record["failures"][0]


async def test_push_learns_how_many_ranks_there_are() -> None:
    async with pair("nixl-push") as two:
        two.p.board.spoil = lambda offer: {**offer, "tp_size": 2}
        plans = []
        for _ in range(2):
            answer = await two.router.client.post(COMPLETIONS, json=BODY)
            plans.append(answer.headers["x-splitserve-plan"])
        assert plans == ["aggregated", "disaggregated"]
        assert json.loads(two.d.calls()[-1].body)["kv_transfer_params"]["tp_size"] == 2


async def test_files_carry_what_a_converter_needs() -> None:
    async with pair("example") as two:
        answer = await two.router.client.post(COMPLETIONS, json=BODY)
        assert answer.headers["x-splitserve-plan"] == "disaggregated"
        assert json.loads(two.p.calls()[0].body)["return_token_ids"] is True
        assert json.loads(two.d.calls()[0].body) == BODY
        (ready,) = [e for e, _ in two.router.steps if isinstance(e, HandoffReady)]
        attributes = json.loads(ready.handoff.attributes)
        tokens = two.p.kv.counters.local_compute
        assert attributes["folder"] == "/shared"
        assert attributes["token_ids"] == list(range(tokens))
        assert attributes["block_tokens"] == 16
        assert two.d.kv.counters.external_kv_transfer == (tokens - 2) // 16 * 16


@pytest.mark.parametrize(
    "length,split", [(48, True), (49, False), (50, True), (17, False), (10, False)]
)
async def test_files_that_would_not_be_found_are_not_counted_on(length: int, split: bool) -> None:
    async with pair("example") as two:
        body = {**BODY, "prompt": list(range(length))}
        answer = await two.router.client.post(COMPLETIONS, json=body)
        plan = "disaggregated" if split else "aggregated"
        assert answer.headers["x-splitserve-plan"] == plan
        record = await two.router.record(answer)
        assert record["actual"]["recomputed_tokens"] is None
        assert [f"prompt of {length} tokens" in each for each in record["failures"]] == (
            [] if split else [True]
        )
        assert (two.d.kv.counters.local_compute < length) is split


async def test_a_decode_worker_that_computes_anew_is_found_out() -> None:
    async with pair("nixl-pull") as two:
        await two.poll()
        await two.router.client.post(COMPLETIONS, json=BODY)
        await two.poll()
        assert await two.metric("splitserve_handoff_recomputes_total") == 0
        two.p.board.spoil = lambda offer: {**offer, "remote_port": 9}
        answer = await two.router.client.post(COMPLETIONS, json=BODY)
        assert answer.headers["x-splitserve-plan"] == "disaggregated"
        await two.router.idle()
        await two.poll()
        assert await two.metric("splitserve_handoff_recomputes_total") == 0  # it may count late
        await two.poll()
        assert await two.metric("splitserve_handoff_recomputes_total") == 1
        recomputed = await two.metric("splitserve_handoff_recomputed_tokens_total")
        assert recomputed == two.d.kv.counters.local_compute > 0
        await two.poll()
        assert await two.metric("splitserve_handoff_recomputes_total") == 1


async def test_a_decode_worker_that_cannot_take_the_kv_is_no_end() -> None:
    async with pair("nixl-pull", recomputes=False) as two:
        two.p.board.spoil = lambda offer: {**offer, "remote_port": 9}
        answer = await two.router.client.post(COMPLETIONS, json=BODY)
        assert answer.status_code == 200
        assert answer.headers["x-splitserve-plan"] == "aggregated"
        record = await two.router.record(answer)
        assert "could not use the KV handed over: HTTP 500" in record["failures"][0]


@pytest.mark.parametrize(
    "more",
    [
        {"prompt_logprobs": 1},
        {"truncate_prompt_tokens": -1},
        {"use_beam_search": True},
        {"n": 2},
    ],
)
async def test_what_vllm_cannot_split_runs_whole(more: dict[str, object]) -> None:
    async with pair("nixl-pull") as two:
        answer = await two.router.client.post(COMPLETIONS, json={**BODY, **more})
        assert answer.headers["x-splitserve-plan"] == "aggregated"
        assert two.p.calls() == []
        record = await two.router.record(answer)
        assert f"cannot be split ({next(iter(more))}: " in record["failures"][0]


async def test_an_error_in_the_prefill_answer_is_the_clients() -> None:
    async with pair("nixl-pull") as two:
        two.p.enqueue(Script(status=404))
        answer = await two.router.client.post(COMPLETIONS, json=BODY)
        assert answer.status_code == 404
        assert two.d.calls() == []


async def test_a_client_that_leaves_ends_both_legs() -> None:
    async with pair("nixl-push") as two:
        two.p.board.prefill_gate = asyncio.Event()
        async with RawClient(two.router.url) as client:
            client.post(COMPLETIONS, json.dumps(STREAM).encode())
            await two.d.until(lambda _: len(two.d.calls()) == 1)
            await two.p.until(lambda _: len(two.p.calls()) == 1)
        await two.p.until(lambda _: two.p.calls()[0].outcome == "client_gone")
        await two.d.until(lambda _: two.d.calls()[0].outcome == "client_gone")


async def test_a_restart_is_noticed() -> None:
    async with pair("nixl-pull") as two:
        two.d.facts.started_s += 1
        registry = two.router.app.registry
        before = two.router.app.dispatcher.backends["d"]
        registry.poke("d")
        await two.router.until(
            lambda: two.router.app.dispatcher.backends.get("d") not in (None, before)
        )


@pytest.mark.parametrize("field,value", [("version", "0.33.0"), ("root", "org/other")])
async def test_workers_that_differ_are_no_pair(field: str, value: str) -> None:
    fabric = Fabric()
    async with FakeVllm("nixl-pull", fabric) as p, FakeVllm("nixl-pull", fabric) as d:
        setattr(d.facts, field, value)
        entries = [
            {"url": worker.url, "name": name, "role": role, "kv": worker.settings}
            for worker, name, role in ((p, "p", "prefill"), (d, "d", "decode"))
        ]
        async with LoopbackRouter(*entries) as router:
            answer = await router.client.post(COMPLETIONS, json=BODY)
            assert answer.headers["x-splitserve-plan"] == "aggregated"
            record = await router.record(answer)
            reasons = [each["why_not"] or "" for each in record["candidates"]]
            assert any("KV differs in" in reason and value in reason for reason in reasons)
