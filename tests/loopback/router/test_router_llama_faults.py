"""What goes wrong between two llama-servers: files, couriers, servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from router.testing.llama_slot import tokens_of
from splitserve import messages as m
from tests.loopback.router.llama_pair import (
    BODY,
    PROMPT_TOKENS,
    LlamaSplit,
    llama_split,
)
from workers.courier.testing.served_courier import ServedCourier


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[LlamaSplit]:
    async with llama_split(tmp_path) as served:
        yield served


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
