"""Slot leases: whoever comes first is served first, and no slot is ever held twice or lost."""

from __future__ import annotations

import asyncio
import random

import pytest

from router.backends.llama_slots import Lease, SlotTable


async def turns(number: int = 3) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def test_slots_are_handed_out_longest_unused_first() -> None:
    table = SlotTable(3)
    leases = [await table.lease() for _ in range(3)]
    assert [lease.slot for lease in leases] == [0, 1, 2]
    for number in (1, 0, 2):
        leases[number].give_back()
    assert [(await table.lease()).slot for _ in range(3)] == [1, 0, 2]


async def test_a_lease_ends_once() -> None:
    table = SlotTable(1)
    first = await table.lease()
    first.give_back()
    second = await table.lease()
    first.give_back()
    assert table.leased == 1
    assert second.numbers == [0]
    assert first.numbers == []


async def test_who_waits_is_served_in_order() -> None:
    table = SlotTable(1)
    held = await table.lease()
    served: list[int] = []

    async def wait(number: int) -> None:
        lease = await table.lease()
        served.append(number)
        lease.give_back()

    tasks = [asyncio.create_task(wait(number)) for number in range(4)]
    await turns()
    assert table.waiting == 4
    held.give_back()
    await asyncio.gather(*tasks)
    assert served == [0, 1, 2, 3]
    assert (table.leased, table.waiting) == (0, 0)


async def test_all_slots_are_waited_for_and_nobody_overtakes() -> None:
    table = SlotTable(2)
    held = [await table.lease(), await table.lease()]
    everything = asyncio.create_task(table.lease(everything=True))
    later = asyncio.create_task(table.lease())
    held[0].give_back()
    await turns()
    assert not everything.done()
    assert not later.done(), "it overtook the one that waits for all"
    held[1].give_back()
    assert sorted((await everything).numbers) == [0, 1]
    (await everything).give_back()
    assert (await later).slot in (0, 1)


@pytest.mark.parametrize("served", [False, True])
async def test_who_leaves_while_waiting_takes_nothing_along(served: bool) -> None:
    table = SlotTable(1)
    held = await table.lease()
    waiting = asyncio.create_task(table.lease())
    await turns()
    if served:  # the slot is given to it in the turn in which it leaves
        held.give_back()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    held.give_back()
    assert (table.leased, table.waiting) == (0, 0)


async def test_who_leaves_lets_the_next_one_on() -> None:
    table = SlotTable(2)
    held = await table.lease()
    everything = asyncio.create_task(table.lease(everything=True))
    await turns()
    next_one = asyncio.create_task(table.lease())
    await turns()
    everything.cancel()
    assert (await next_one).slot == 1
    held.give_back()


async def test_the_slot_with_the_most_of_a_prompt_is_preferred() -> None:
    table = SlotTable(3)
    for prompt in (b"a" * 100, b"b" * 100, b"a" * 60 + b"c" * 40):
        lease = await table.lease()
        lease.holds(prompt)
        lease.give_back()
    lease = await table.lease(b"a" * 80 + b"d" * 400)
    assert lease.slot == 0
    assert (await table.lease(b"a" * 80)).slot == 2  # the next best, as the first is in use
    lease.give_back()


async def test_a_short_common_beginning_is_not_worth_a_slot() -> None:
    table = SlotTable(2)
    for prompt in (b"x" * 1000, b"[" + b"y" * 999):
        lease = await table.lease()
        lease.holds(prompt)
        lease.give_back()
    assert (await table.lease(b"[" + b"z" * 999)).slot == 0


async def test_what_nobody_uses_can_be_taken_at_once() -> None:
    table = SlotTable(3)
    held = await table.lease()
    held.holds(b"kept")
    idle = table.take_idle()
    assert idle.numbers == [1, 2]
    assert table.take_idle().numbers == []
    waiting = asyncio.create_task(table.lease())
    await turns()
    assert not waiting.done()
    idle.holds(b"")
    idle.give_back()
    assert (await waiting).slot in (1, 2)


@pytest.mark.parametrize("seed", range(20))
async def test_any_order_of_events_leaves_every_slot_free(seed: int) -> None:
    draw, table = random.Random(seed), SlotTable(3)
    tasks: list[asyncio.Task[Lease]] = []
    held: list[Lease] = []
    for _ in range(300):
        match draw.randrange(4):
            case 0:
                whole = draw.random() < 0.2
                tasks.append(asyncio.create_task(table.lease(everything=whole)))
            case 1 if held:
                held.pop(draw.randrange(len(held))).give_back()
            case 2 if tasks:
                tasks.pop(draw.randrange(len(tasks))).cancel()
            case _:
                await asyncio.sleep(0)
        done = [task for task in tasks if task.done()]
        tasks = [task for task in tasks if not task.done()]
        held += [task.result() for task in done]
        used = [number for lease in held for number in lease.numbers]
        assert len(used) == len(set(used)), "a slot was given to two"
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        if not task.cancelled():
            held.append(task.result())
    for lease in held:
        lease.give_back()
    assert (table.leased, table.waiting) == (0, 0)
