"""Hand-offs between llama-servers over real sockets: fake servers, real couriers, real router."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from router.testing.fake_llama import FakeLlama
from router.testing.llama_slot import tokens_of
from router.testing.loopback_router import LoopbackRouter
from router.testing.raw_client import RawClient
from router.testing.script import Script
from splitserve import messages as m
from workers.courier.testing.served_courier import ServedCourier

CHAT = "/v1/chat/completions"
WORDS = "how long is the river that runs below the old stone bridge in the north"
BODY = {"model": "m", "messages": [{"role": "user", "content": WORDS}], "max_tokens": 3}
STREAM = {**BODY, "stream": True}
PROMPT = {"model": "m", "prompt": WORDS, "max_tokens": 3}
PROMPT_TOKENS = len(tokens_of(f"< user > {WORDS} < assistant >"))


@dataclass(frozen=True, slots=True)
class LlamaSplit:
    """A router before two llama-servers, `p` and `d`, each with its courier."""

    router: LoopbackRouter
    p: FakeLlama
    d: FakeLlama
    p_courier: ServedCourier
    d_courier: ServedCourier

    async def ask(self, body: object, route: str = CHAT, **headers: str) -> Any:
        answer = await self.router.client.post(
            route, json=body, headers={k.replace("_", "-"): v for k, v in headers.items()}
        )
        assert answer.status_code == 200, answer.text
        return answer

    async def record(self, answer: Any) -> dict[str, Any]:
        return await self.router.record(answer)

    async def clean(self) -> None:
        """Nothing is left: no request, no slot in use, no file, and no answer was wrong."""
        await self.router.idle()
        for fake in (self.p, self.d):
            await fake.until(lambda _, fake=fake: fake.busy == 0)  # type: ignore[misc]
            assert not fake.aborted
            assert fake.wrong_answers == 0
            assert fake.not_owned == 0
        for courier in (self.p_courier, self.d_courier):
            await self.router.until(lambda c=courier: c.files() == [])  # type: ignore[misc]


@contextlib.asynccontextmanager
async def llama_split(
    folder: Path, *, shared: bool = False, **settings: Any
) -> AsyncIterator[LlamaSplit]:
    places = [folder / "both", folder / "both"] if shared else [folder / "p", folder / "d"]
    async with FakeLlama(folder=places[0]) as p, FakeLlama(folder=places[1]) as d:
        with ServedCourier(places[0], key="pk") as pc, ServedCourier(places[1], key="dk") as dc:
            workers = (
                worker("p", "prefill", p, pc, courier_key_env="PK"),
                worker("d", "decode", d, dc, courier_key_env="DK"),
            )
            environ = {"PK": "pk", "DK": "dk"}
            async with LoopbackRouter(*workers, environ=environ, **settings) as router:
                yield LlamaSplit(router, p, d, pc, dc)


def worker(
    name: str, role: str, fake: FakeLlama, courier: ServedCourier | None = None, **more: str
) -> dict[str, str]:
    entry = {"url": fake.url, "name": name, "role": role, **more}
    return entry if courier is None else {**entry, "courier": courier.url}


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


# --- what goes wrong ----------------------------------------------------------------------------


def cut(content: bytes) -> bytes:
    return content[:-1]


def emptied(content: bytes) -> bytes:
    return b""


def flipped(content: bytes) -> bytes:
    return content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]


def foreign(content: bytes) -> bytes:
    return b"GGUF" * (len(content) // 4) + content[: len(content) % 4]


TAMPERING = [cut, emptied, flipped, foreign]


def change(courier: ServedCourier, tamper: Callable[[bytes], bytes]) -> None:
    (name,) = courier.files()
    path = courier.folder / name
    path.write_bytes(tamper(path.read_bytes()))


@pytest.mark.parametrize("tamper", TAMPERING)
async def test_a_file_changed_before_it_is_fetched(
    pair: LlamaSplit, tamper: Callable[[bytes], bytes]
) -> None:
    """Sealed, then changed in the prefill worker's folder: the decode side refuses it."""
    backend = pair.router.app.dispatcher.backends["d"]
    decode = backend.decode

    async def changed(call: Any, handoff: m.Handoff | None) -> Any:
        if handoff is not None:
            change(pair.p_courier, tamper)
        return await decode(call, handoff)

    backend.decode = changed  # type: ignore[method-assign]
    answer = await pair.ask(BODY)
    assert answer.headers["x-splitserve-plan"] == "aggregated"
    record = await pair.record(answer)
    assert "courier: HTTP 409" in record["failures"][0]
    await pair.clean()


@pytest.mark.parametrize("tamper", [cut, emptied, foreign])
async def test_a_file_changed_before_it_is_sealed(
    pair: LlamaSplit, tamper: Callable[[bytes], bytes]
) -> None:
    slot_write = type(pair.p.slots[0]).write

    def write(slot: Any, path: Path, streams: int) -> int:
        size_bytes = slot_write(slot, path, streams)
        path.write_bytes(tamper(path.read_bytes()))
        return size_bytes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(pair.p.slots[0]), "write", write)
        answer = await pair.ask(BODY)
    record = await pair.record(answer)
    assert "courier: HTTP 409" in record["failures"][0]
    assert answer.headers["x-splitserve-plan"] == "aggregated"
    await pair.clean()


async def test_a_whole_file_of_another_prompt_in_the_decode_folder(pair: LlamaSplit) -> None:
    """Swapped after the courier's check: what was restored is not what was sent."""
    gate = pair.d.hold("restore")
    asked = asyncio.ensure_future(pair.ask(BODY))
    await pair.d.until(lambda _: pair.d.held("restore") == 1)
    other = pair.p.slots[0]
    other.fill(tokens_of("a shorter one"))
    (name,) = pair.d_courier.files()
    other.write(pair.d_courier.folder / name, 1)
    gate.set()
    answer = await asked
    assert answer.headers["x-splitserve-plan"] == "aggregated"
    record = await pair.record(answer)
    assert "instead of what was sent" in record["failures"][0]
    await pair.clean()


async def test_a_decode_server_that_cannot_restore(pair: LlamaSplit) -> None:
    pair.d.flags.streams = 4  # as if it was started anew with other flags and nobody has seen it
    answer = await pair.ask(BODY)
    assert answer.headers["x-splitserve-plan"] == "aggregated"
    record = await pair.record(answer)
    assert "restore: HTTP 400: Unable to restore slot" in record["failures"][0]
    pair.d.flags.streams = 1
    await pair.clean()


@pytest.mark.parametrize("side", ["p", "d"])
async def test_a_courier_that_dies(pair: LlamaSplit, side: str) -> None:
    courier = pair.p_courier if side == "p" else pair.d_courier
    courier.stop()
    answer = await pair.ask(BODY)
    assert answer.headers["x-splitserve-plan"] == "aggregated"
    record = await pair.record(answer)
    assert "courier" in record["failures"][0]
    await pair.router.idle()
    assert pair.p.busy == pair.d.busy == 0
    pair.router.app.registry.poke(side)
    member = pair.router.app.registry.members[side]
    await pair.router.until(lambda: member.snapshot is not None and not member.snapshot.connector)
    again = await pair.ask(BODY)
    assert (await pair.record(again))["failures"] == []


async def test_a_server_that_lost_the_slot_is_noticed(pair: LlamaSplit) -> None:
    pair.d.flags.reuses_restored = False
    answer = await pair.ask(BODY)
    record = await pair.record(answer)
    assert record["actual"]["recomputed_tokens"] == PROMPT_TOKENS - 1
    await pair.clean()
