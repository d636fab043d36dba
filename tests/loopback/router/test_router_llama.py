"""Hand-offs between llama-servers over real sockets: fake servers, real couriers, real router."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from router.testing.fake_llama import FakeLlama
from router.testing.llama_slot import tokens_of
from router.testing.raw_client import RawClient
from router.testing.script import Script
from splitserve import messages as m
from tests.loopback.router.llama_pair import (
    BODY,
    CHAT,
    PROMPT,
    PROMPT_TOKENS,
    STREAM,
    WORDS,
    LlamaSplit,
    llama_split,
)


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[LlamaSplit]:
    async with llama_split(tmp_path) as served:
        yield served


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["plain", "stream"])
async def test_a_chat_is_handed_over(pair: LlamaSplit, body: dict[str, object]) -> None:
    answer = await pair.ask(body)
    assert answer.headers["x-splitserve-workers"] == "prefill=p,decode=d"
    (decoded,) = pair.d.calls()
    sent = json.loads(decoded.body)
    assert {**body, "id_slot": sent["id_slot"], "cache_prompt": True} == sent
    last = json.loads(pair.p.calls("/completion")[-1].body)
    assert len(last["prompt"]) == PROMPT_TOKENS - 1
    assert last["n_predict"] == 0
    record = await pair.record(answer)
    assert record["failures"] == []
    actual = record["actual"]
    assert actual["recomputed_tokens"] == 0
    assert actual["transfer_bytes"] > 0
    assert actual["transfer_ms"] > 0
    # The fake tells a millisecond a token. All but the first was new, the last one not its part.
    assert actual["prefill_ms"] == PROMPT_TOKENS - 2
    assert b'"cache_n": %d' % (PROMPT_TOKENS - 1) in answer.content
    assert b'"prompt_n": 1,' in answer.content
    await pair.clean()


@pytest.mark.parametrize(
    "prompt", [WORDS, [WORDS], tokens_of(WORDS)], ids=["text", "one text", "ids"]
)
async def test_completions_are_handed_over(pair: LlamaSplit, prompt: object) -> None:
    answer = await pair.ask({**PROMPT, "prompt": prompt}, "/v1/completions")
    assert answer.headers["x-splitserve-plan"] == "disaggregated"
    record = await pair.record(answer)
    assert record["actual"]["recomputed_tokens"] == 0
    assert pair.p.calls("/apply-template") == []
    await pair.clean()


async def test_couriers_of_one_folder(tmp_path: Path) -> None:
    async with llama_split(tmp_path, shared=True) as pair:
        answer = await pair.ask(BODY)
        assert answer.headers["x-splitserve-plan"] == "disaggregated"
        record = await pair.record(answer)
        assert record["actual"]["recomputed_tokens"] == 0
        await pair.clean()


async def test_many_at_once_share_the_slots(pair: LlamaSplit) -> None:
    bodies = [
        {**BODY, "messages": [{"role": "user", "content": f"{i} {WORDS}"}]} for i in range(24)
    ]
    answers = await asyncio.gather(*(pair.ask(body) for body in bodies))
    records = [await pair.record(answer) for answer in answers]
    assert {record["chosen"]["plan"] for record in records} == {"disaggregated"}
    assert [record["actual"]["recomputed_tokens"] for record in records] == [0] * 24
    await pair.clean()


async def test_several_answers_take_all_slots(pair: LlamaSplit) -> None:
    many = [pair.ask({**BODY, "n": 3}), *(pair.ask(BODY) for _ in range(6))]
    answers = await asyncio.gather(*many, pair.ask({**BODY, "n": 2}))
    assert [len(answer.json()["choices"]) for answer in answers] == [3, 1, 1, 1, 1, 1, 1, 2]
    records = [await pair.record(answer) for answer in answers]
    assert [record["actual"]["recomputed_tokens"] for record in records] == [0] * 8
    await pair.clean()


async def test_whole_requests_have_slots_of_their_own_too(pair: LlamaSplit) -> None:
    whole = {"x_splitserve_plan": "aggregated", "x_splitserve_worker": "d"}
    await asyncio.gather(*(pair.ask(BODY, **whole) for _ in range(6)), pair.ask(BODY))
    assert all("id_slot" in json.loads(call.body) for call in pair.d.calls())
    await pair.clean()


async def test_a_prefix_is_prefilled_in_the_slot_that_has_it(pair: LlamaSplit) -> None:
    first = await pair.ask(BODY)
    await pair.ask({**BODY, "messages": [{"role": "user", "content": "another " * 40}]})
    turns = [*BODY["messages"], {"role": "assistant", "content": "w0"}]  # type: ignore[misc]
    longer = {**BODY, "messages": [*turns, {"role": "user", "content": "and how wide is it"}]}
    again = await pair.ask(longer)
    record = await pair.record(again)
    assert record["actual"]["recomputed_tokens"] == 0
    finished = [e for e, _ in pair.router.steps if isinstance(e, m.PrefillFinished)]
    assert [event.cached_tokens > 10 for event in finished] == [False, False, True]
    assert (await pair.record(first))["actual"]["recomputed_tokens"] == 0
    await pair.clean()


async def test_restored_slots_make_room_for_each_other(tmp_path: Path) -> None:
    async with llama_split(tmp_path) as pair:
        for fake in (pair.p, pair.d):
            fake.flags.context_tokens = 2 * PROMPT_TOKENS + 8
        for number in range(8):
            body = {**BODY, "messages": [{"role": "user", "content": f"{number} {WORDS}"}]}
            answer = await pair.ask(body)
            record = await pair.record(answer)
            assert record["failures"] == []
            assert record["actual"]["recomputed_tokens"] == 0
        await pair.clean()


@pytest.mark.parametrize(
    "body,route,why",
    [
        ({**PROMPT, "prompt": ""}, "/v1/completions", "leaves nothing to hand over"),
        ({**PROMPT, "prompt": [5]}, "/v1/completions", "leaves nothing to hand over"),
        ({**PROMPT, "prompt": [5, "a"]}, "/v1/completions", "of texts and ids"),
        ({**PROMPT, "prompt": {"a": 1}}, "/v1/completions", "of this form"),
        ({**PROMPT, "prompt": "a " * 5000}, "/v1/completions", "do not fit into a slot"),
        (
            {**BODY, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            CHAT,
            "no images",
        ),
    ],
)
async def test_prompts_that_run_whole(
    pair: LlamaSplit, body: dict[str, object], route: str, why: str
) -> None:
    pair.p.flags.sees_images = True
    answer = await pair.router.client.post(route, json=body)
    record = pair.router.latest()
    assert why in record["failures"][0]
    assert record["attempts"] == 2
    assert answer.headers.get("x-splitserve-plan", "aggregated") == "aggregated"
    await pair.clean()


async def test_the_clients_mistake_is_answered_in_the_engines_words(pair: LlamaSplit) -> None:
    answer = await pair.router.client.post(CHAT, json={**BODY, "messages": [3]})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "Expected 'messages' to be an array of objects"
    assert pair.router.latest()["attempts"] == 1
    assert pair.d.calls() == []
    await pair.clean()


async def test_a_client_cannot_choose_a_slot(pair: LlamaSplit) -> None:
    await pair.ask({**BODY, "id_slot": 77, "cache_prompt": False})
    (decoded,) = pair.d.calls()
    sent = json.loads(decoded.body)
    assert sent["id_slot"] in range(4)
    assert sent["cache_prompt"] is True
    assert decoded.body.count(b"id_slot") == 1
    await pair.clean()


async def test_a_lora_adapter_is_used_on_both_sides(pair: LlamaSplit) -> None:
    adapter = [{"id": 0, "scale": 0.5}]
    await pair.ask({**BODY, "lora": adapter})
    assert json.loads(pair.p.calls("/completion")[-1].body)["lora"] == adapter
    assert json.loads(pair.d.calls()[-1].body)["lora"] == adapter
    await pair.clean()


async def test_other_routes_have_the_server_to_themselves(pair: LlamaSplit) -> None:
    answer = await pair.router.client.post("/v1/embeddings", json={"model": "m", "input": "a"})
    assert answer.status_code == 404  # of the fake, which has no embeddings
    counted = await pair.router.client.post("/v1/messages/count_tokens", json={"model": "m"})
    assert counted.status_code == 404
    await pair.clean()


# --- clients that leave -------------------------------------------------------------------------


def held_at(pair: LlamaSplit, where: str) -> tuple[FakeLlama, asyncio.Event]:
    fake = pair.d if where == "restore" else pair.p
    return fake, fake.hold(where)


@pytest.mark.parametrize("where", ["evaluate", "save", "restore"])
async def test_a_client_that_leaves_frees_the_slots(pair: LlamaSplit, where: str) -> None:
    fake, gate = held_at(pair, where)
    async with RawClient(pair.router.url) as client:
        client.post(CHAT, json.dumps(STREAM).encode())
        await fake.until(lambda _: fake.held(where) == 1)
    await pair.router.until(lambda: pair.router.app.dispatcher.live == 0)
    gate.set()
    await pair.clean()
    answer = await pair.ask(BODY)
    assert answer.headers["x-splitserve-plan"] == "disaggregated"
    await pair.clean()


async def test_a_slot_is_not_given_away_before_its_restore_is_over(tmp_path: Path) -> None:
    async with llama_split(tmp_path) as pair:
        gate = pair.d.hold("restore")
        clients = [RawClient(pair.router.url) for _ in range(4)]
        async with contextlib.AsyncExitStack() as stack:
            for client in clients:
                await stack.enter_async_context(client)
                client.post(CHAT, json.dumps(STREAM).encode())
            await pair.d.until(lambda _: pair.d.held("restore") == 4)
        await pair.router.until(lambda: pair.router.app.dispatcher.live == 0)
        asked = asyncio.ensure_future(pair.ask({**BODY, "messages": [
            {"role": "user", "content": f"another {WORDS}"}]}))  # fmt: skip
        await pair.p.until(lambda _: pair.p.held("save") == 6)  # the fifth, after the join's own
        assert pair.d.held("restore") == 4
        gate.set()
        record = await pair.record(await asked)
        assert record["actual"]["recomputed_tokens"] == 0
        await pair.clean()


@pytest.mark.parametrize("tokens_seen", [0, 1])
async def test_a_client_that_leaves_its_stream_frees_the_slot(
    pair: LlamaSplit, tokens_seen: int
) -> None:
    pair.d.set_script(Script(silent_after_chunks=tokens_seen))
    async with RawClient(pair.router.url) as client:
        client.post(CHAT, json.dumps(STREAM).encode())
        await pair.d.until(lambda fake: fake.open_streams == 1)
        if tokens_seen:
            await client.until(b"w0 ")
    pair.d.set_script(Script())
    await pair.clean()
    for _ in range(4):
        await pair.ask(BODY)
    await pair.clean()
