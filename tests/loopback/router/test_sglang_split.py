"""SGLang's two-sided protocol over real sockets: both legs at once, and neither left alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from router.testing.connection import RecordedRequest
from router.testing.fake_sglang import FakeSglang
from router.testing.loopback_router import LoopbackRouter
from router.testing.raw_client import RawClient
from router.testing.rendezvous import Rendezvous
from router.testing.script import Script
from splitserve.messages import Role

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
STREAM = {**BODY, "stream": True, "stream_options": {"include_usage": True}}
BOTH = pytest.mark.parametrize("body", [BODY, STREAM], ids=["plain", "stream"])
ROOM = ("bootstrap_host", "bootstrap_port", "bootstrap_room")


@dataclass(frozen=True, slots=True)
class Pair:
    """A router in front of a prefill and a decode server."""

    router: LoopbackRouter
    prefill: FakeSglang
    decode: FakeSglang

    @property
    def network(self) -> Rendezvous:
        return self.prefill.network

    def outcomes(self) -> tuple[list[str], list[str]]:
        """How each request for a generation ended, on either side."""
        return _outcomes(self.prefill), _outcomes(self.decode)

    @property
    def sides(self) -> tuple[FakeSglang, FakeSglang]:
        return self.prefill, self.decode


def _outcomes(side: FakeSglang) -> list[str]:
    return [call.outcome for call in side.calls()]


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    network = Rendezvous()
    async with FakeSglang("prefill", network) as p, FakeSglang("decode", network) as d:
        async with LoopbackRouter({"url": p.url, "name": "p"}, {"url": d.url, "name": "d"}) as r:
            yield Pair(r, p, d)
            await r.idle()
    assert network.rooms == {}


def room_of(call: RecordedRequest) -> dict[str, object]:
    body = json.loads(call.body)
    return {name: body[name] for name in ROOM}


# --- what is sent ---------------------------------------------------------------------------------


@BOTH
async def test_both_get_the_same_body_and_room(pair: Pair, body: dict[str, object]) -> None:
    answer = await pair.router.client.post(CHAT, json=body)
    assert answer.status_code == 200
    assert answer.headers["x-splitserve-plan"] == "disaggregated"
    assert answer.headers["x-splitserve-workers"] == "prefill=p,decode=d"
    (first,), (second,) = (each.calls() for each in pair.sides)
    assert first.body == second.body
    assert first.path == second.path == CHAT
    room = room_of(first)
    assert room["bootstrap_host"] == "127.0.0.1"
    assert room["bootstrap_port"] == 8998
    assert pair.network.met == [room["bootstrap_room"]]
    sent = json.loads(first.body)
    assert {name: value for name, value in sent.items() if name not in ROOM} == body


async def test_every_request_has_a_room_of_its_own(pair: Pair) -> None:
    sent = (pair.router.client.post(CHAT, json=BODY) for _ in range(20))
    answers = await asyncio.gather(*sent)
    assert {answer.status_code for answer in answers} == {200}
    rooms = [room_of(call)["bootstrap_room"] for call in pair.prefill.calls()]
    assert len(set(rooms)) == 20
    assert all(isinstance(room, int) and 0 <= room < 1 << 63 for room in rooms)


async def test_a_clients_own_room_and_ranks_are_replaced(pair: Pair) -> None:
    forged = {
        "bootstrap_host": "2.2.2.2",
        "bootstrap_room": 5,
        "bootstrap_port": None,
        "routed_dp_rank": 1,
        "disagg_prefill_dp_rank": 1,
        "data_parallel_rank": 1,
    }
    answer = await pair.router.client.post(CHAT, json={**BODY, **forged})
    assert answer.status_code == 200
    for side in pair.sides:
        (call,) = side.calls()
        assert json.loads(call.body).keys() == BODY.keys() | set(ROOM)
        assert room_of(call)["bootstrap_host"] == "127.0.0.1"
        assert room_of(call)["bootstrap_room"] != 5


async def test_several_prompts_take_a_room_each(pair: Pair) -> None:
    body = {"model": "m", "prompt": ["one", "two", "three"], "max_tokens": 2}
    answer = await pair.router.client.post(COMPLETIONS, json=body)
    assert answer.status_code == 200
    (call,) = pair.decode.calls()
    first = room_of(call)["bootstrap_room"]
    assert isinstance(first, int)
    assert pair.network.met == [first, first + 1, first + 2]


async def test_what_cannot_be_split_is_refused_with_the_reason(pair: Pair) -> None:
    body = {"model": "m", "input": "a"}
    answer = await pair.router.client.post("/v1/embeddings", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "unplannable"
    assert "/v1/embeddings is not a generation" in error["message"]
    assert pair.outcomes() == ([], [])


async def test_the_record_shows_what_the_prefill_server_said(pair: Pair) -> None:
    answer = await pair.router.client.post(CHAT, json=STREAM)
    await pair.router.idle()
    record = await pair.router.record(answer)
    assert record["failures"] == []
    assert record["chosen"]["workers"] == {"prefill": "p", "decode": "d"}
    whole = [c for c in record["candidates"] if c["plan"] == "aggregated"]
    assert {c["why_not"] for c in whole} == {"its engine serves nothing whole"}
    assert record["actual"]["finish"] == "done"
    assert record["actual"]["prefill_ms"] > 0


async def test_decode_waits_for_prefill_and_not_the_other_way_round(pair: Pair) -> None:
    gate = asyncio.Event()
    pair.prefill.hold_transfers(gate)
    asked = asyncio.ensure_future(pair.router.client.post(CHAT, json=STREAM))
    await pair.decode.until(lambda _: len(pair.network.met) == 1)
    assert pair.outcomes() == (["open"], ["open"])
    gate.set()
    assert (await asked).status_code == 200
    assert pair.outcomes()[1] == ["done"]


# --- a leg that fails takes the other with it -----------------------------------------------------


@BOTH
@pytest.mark.parametrize(
    "fault",
    [Script(status=500), Script(raw="gone"), Script(status=429)],
    ids=["500", "broken", "429"],
)
async def test_prefill_that_fails_closes_decode_at_once(
    pair: Pair, body: dict[str, object], fault: Script
) -> None:
    pair.prefill.enqueue(fault)
    answer = await pair.router.client.post(CHAT, json=body)
    assert answer.status_code == 200  # the second attempt, on the same pair: there is no other
    await pair.router.idle()
    assert pair.outcomes()[1][0] == "client_gone"  # it waited in its room for nobody
    assert pair.outcomes()[1][1:] == ["done"]
    record = await pair.router.record(answer)
    assert record["attempts"] == 2
    (failure,) = record["failures"]
    assert failure.startswith("attempt 1, prefill on p: ")


@BOTH
@pytest.mark.parametrize(
    "fault",
    [Script(status=500), Script(raw="gone")],
    ids=["500", "broken"],
)
async def test_decode_that_fails_closes_prefill_at_once(
    pair: Pair, body: dict[str, object], fault: Script
) -> None:
    pair.decode.enqueue(fault)
    answer = await pair.router.client.post(CHAT, json=body)
    assert answer.status_code == 200
    await pair.router.idle()
    assert pair.outcomes()[0][0] == "client_gone"
    assert pair.outcomes()[1][1:] == ["done"]
    record = await pair.router.record(answer)
    (failure,) = record["failures"]
    assert failure.startswith("attempt 1, decode on d: ")


@BOTH
async def test_transfer_that_fails_is_tried_again(pair: Pair, body: dict[str, object]) -> None:
    """A stream that cannot begin is a 200 with an error in it; the client sees nothing of that."""
    words = "Decode transfer failed for request rank=0 with exception KVTransferError"
    pair.prefill.break_transfers(words)
    asked = asyncio.ensure_future(pair.router.client.post(CHAT, json=body))
    await pair.decode.until(lambda _: "done" in pair.outcomes()[1])
    pair.prefill.break_transfers("")
    answer = await asked
    assert answer.status_code == 200
    assert b"error" not in answer.content
    record = await pair.router.record(answer)
    assert record["failures"]
    assert all("HTTP 500: Decode transfer failed" in failure for failure in record["failures"])


@BOTH
async def test_transfers_that_always_fail_end_as_an_error(
    pair: Pair, body: dict[str, object]
) -> None:
    pair.prefill.break_transfers("Decode transfer failed: KVTransferError")
    answer = await pair.router.client.post(CHAT, json=body)
    assert answer.status_code == 502
    error = answer.json()["error"]
    assert error["code"] == "worker_failed"
    assert "Decode transfer failed" in error["message"]
    assert len(pair.network.met) == 3  # each attempt in a room of its own


async def test_a_clients_mistake_is_told_once(pair: Pair) -> None:
    refusal = json.dumps({"status": 400})
    pair.prefill.enqueue(Script(status=400))
    answer = await pair.router.client.post(CHAT, json=BODY, headers={"x-fake": refusal})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "scripted 400"
    await pair.router.idle()
    assert max(map(len, pair.outcomes())) == 1


async def test_client_that_leaves_frees_both_sides(pair: Pair) -> None:
    pair.prefill.hold_transfers(asyncio.Event())
    async with RawClient(pair.router.url) as client:
        client.post(CHAT, json.dumps(STREAM).encode())
        await pair.decode.until(lambda _: len(pair.network.met) == 1)
    for side in pair.sides:
        await side.until(lambda fake: fake.requests[-1].outcome == "client_gone")


async def test_prefill_that_ends_badly_after_the_first_token_changes_nothing(pair: Pair) -> None:
    pair.prefill.enqueue(Script(cut="rst"))  # half an answer, sent once the KV is across
    answer = await pair.router.client.post(CHAT, json=STREAM)
    assert answer.status_code == 200
    assert answer.content.endswith(b"data: [DONE]\n\n")


async def test_partner_that_dies_leaves_requests_waiting_for_it(pair: Pair) -> None:
    """No request may be served whole meanwhile: it is refused when it has waited long enough."""
    pair.router.app.registry.remove("p")
    assert (await pair.router.client.get("/ready")).status_code == 503
    async with RawClient(pair.router.url) as client:
        client.post(CHAT, json.dumps(BODY).encode())
        await pair.router.until(lambda: pair.router.app.scheduler.queued == 1)
    assert pair.outcomes() == ([], [])


# --- who pairs with whom --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, named",
    [
        ({"page_tokens": 16}, "page (64 / 16)"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_dtype (auto / fp8_e5m2)"),
        ({"model_path": "org/other"}, "model (org/m / org/other)"),
        ({"version": "0.5.22"}, "version (0.5.23 / 0.5.22)"),
        ({"disaggregation_decode_allocation_policy": "late"}, "allocation (early / late)"),
        ({"disaggregation_transfer_backend": "mooncake"}, "sglang-nixl and sglang-mooncake"),
    ],
)
async def test_unlike_servers_are_no_pair(change: dict[str, object], named: str) -> None:
    network = Rendezvous()
    async with FakeSglang("prefill", network) as p, FakeSglang("decode", network) as d:
        for name, value in change.items():
            setattr(d.args, name, value)
        workers = {"url": p.url, "name": "p"}, {"url": d.url, "name": "d"}
        async with LoopbackRouter(*workers, limits={"max_wait_s": 0.05}) as router:
            answer = await router.client.post(CHAT, json=BODY)
            assert answer.status_code == 503
            assert named in answer.json()["error"]["message"]
            assert (await router.client.get("/ready")).status_code == 503
            await router.idle()
        assert p.calls() == d.calls() == []


async def test_sizes_of_parallel_groups_may_differ(pair: Pair) -> None:
    async with FakeSglang("decode", pair.network) as other:
        other.args.tp_ranks = 8
        pair.router.app.registry.remove("d")
        pair.router.app.registry.add(other.url, Role.AUTO, "other")
        members = pair.router.app.registry.members
        await pair.router.until(lambda: members["other"].alive)
        answer = await pair.router.client.post(CHAT, json=BODY)
        assert answer.headers["x-splitserve-workers"] == "prefill=p,decode=other"
        await pair.router.idle()
        pair.router.app.registry.remove("other")


async def test_a_whole_server_takes_what_the_pair_cannot() -> None:
    network = Rendezvous()
    async with (
        FakeSglang("prefill", network) as p,
        FakeSglang("decode", network) as d,
        FakeSglang("null") as whole,
    ):
        workers = [{"url": f.url, "name": n} for f, n in ((p, "p"), (d, "d"), (whole, "w"))]
        async with LoopbackRouter(*workers) as router:
            body = {"model": "m", "prompt": "a", "echo": True, "logprobs": 1}
            answer = await router.client.post(COMPLETIONS, json=body)
            assert answer.headers["x-splitserve-workers"] == "aggregated=w"
            (call,) = whole.calls()
            assert json.loads(call.body) == body  # nothing added
            await router.idle()
