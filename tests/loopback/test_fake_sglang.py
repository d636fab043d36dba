"""The fake SGLang pair's own behaviour: it is as strict as what it stands for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from router.testing.fake_sglang import FAKE_PEER, NO_ROOM, FakeSglang
from router.testing.rendezvous import Rendezvous

CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


def room(number: int, host: str = "127.0.0.1", **more: object) -> dict[str, object]:
    meeting = {"bootstrap_host": host, "bootstrap_port": 8998, "bootstrap_room": number}
    return {**BODY, **meeting, **more}


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=5) as it:
        yield it


@pytest.fixture
async def sides() -> AsyncIterator[tuple[FakeSglang, FakeSglang]]:
    network = Rendezvous(patience_s=0.2)
    async with FakeSglang("prefill", network) as p, FakeSglang("decode", network) as d:
        yield p, d
    assert network.rooms == {}


Sides = tuple[FakeSglang, FakeSglang]


async def test_the_two_meet_in_a_room(sides: Sides, client: httpx.AsyncClient) -> None:
    sent = (client.post(side.url + CHAT, json=room(1)) for side in sides)
    first, second = await asyncio.gather(*sent)
    assert first.json()["usage"]["completion_tokens"] == 1  # it stops by itself
    assert second.json()["usage"]["completion_tokens"] == 3
    assert sides[0].network.met == [1]


@pytest.mark.parametrize("which", [0, 1])
async def test_who_is_alone_gives_up(sides: Sides, client: httpx.AsyncClient, which: int) -> None:
    answer = await client.post(sides[which].url + CHAT, json=room(2))
    assert answer.status_code == 500
    assert "timed out" in answer.json()["message"]


@pytest.mark.parametrize("which", [0, 1])
async def test_a_request_without_a_room_is_refused(
    sides: Sides, client: httpx.AsyncClient, which: int
) -> None:
    answer = await client.post(sides[which].url + CHAT, json=BODY)
    assert (answer.status_code, answer.json()["message"]) == (400, NO_ROOM)


async def test_rooms_that_differ_do_not_meet(sides: Sides, client: httpx.AsyncClient) -> None:
    sent = (client.post(s.url + CHAT, json=room(n)) for n, s in enumerate(sides))
    assert [answer.status_code for answer in await asyncio.gather(*sent)] == [500, 500]
    assert sides[0].network.met == []


async def test_a_room_takes_one_of_each_side(sides: Sides, client: httpx.AsyncClient) -> None:
    waiting = asyncio.ensure_future(client.post(sides[1].url + CHAT, json=room(3)))
    await sides[1].until(lambda _: sides[1].network.alone("decode") == 1)
    again = await client.post(sides[1].url + CHAT, json=room(3))
    assert again.status_code == 500
    assert again.json()["message"] == "bootstrap_room 3 is in use"
    assert (await waiting).status_code == 500


async def test_an_address_where_nobody_listens(sides: Sides, client: httpx.AsyncClient) -> None:
    answer = await client.post(sides[1].url + CHAT, json=room(4, "10.0.0.9"))
    assert answer.status_code == 500
    assert "no bootstrap server answers at 10.0.0.9:8998" in answer.json()["message"]


async def test_unequal_pages_are_refused(sides: Sides, client: httpx.AsyncClient) -> None:
    sides[1].args.page_tokens = 16
    answer = await client.post(sides[1].url + CHAT, json=room(5))
    assert answer.status_code == 500
    assert "KV layouts differ" in answer.json()["message"]


async def test_a_transfer_that_fails_fails_both(sides: Sides, client: httpx.AsyncClient) -> None:
    sides[0].break_transfers("KVTransferError")
    sent = (client.post(side.url + CHAT, json=room(6)) for side in sides)
    for answer in await asyncio.gather(*sent):
        assert (answer.status_code, answer.json()["message"]) == (500, "KVTransferError")


async def test_a_stream_that_fails_is_a_200(sides: Sides, client: httpx.AsyncClient) -> None:
    answer = await client.post(sides[1].url + CHAT, json=room(7, stream=True))
    assert answer.status_code == 200
    event, done = (line for line in answer.text.split("\n\n") if line)
    assert json.loads(event.removeprefix("data: "))["error"]["code"] == 500
    assert done == "data: [DONE]"


async def test_who_leaves_is_out_of_the_room(sides: Sides, client: httpx.AsyncClient) -> None:
    with pytest.raises(httpx.ReadTimeout):
        await client.post(sides[1].url + CHAT, json=room(8), timeout=0.05)
    await sides[1].until(lambda _: sides[1].network.rooms == {})


@pytest.mark.parametrize("which", [0, 1])
async def test_the_built_in_peer_needs_no_partner(
    sides: Sides, client: httpx.AsyncClient, which: int
) -> None:
    for path, body in ((CHAT, room(0, FAKE_PEER)), ("/generate", room(0, FAKE_PEER))):
        assert (await client.post(sides[which].url + path, json=body)).status_code == 200


async def test_what_it_says_of_itself(sides: Sides, client: httpx.AsyncClient) -> None:
    for side, mode in zip(sides, ("prefill", "decode"), strict=True):
        told: dict[str, Any] = (await client.get(side.url + "/server_info")).json()
        assert told["disaggregation_mode"] == mode
        assert (await client.get(side.url + "/metrics")).status_code == 404
