"""Who may use which slot of a llama-server.

A slot holds one sequence's KV. The server hands its slots out by itself unless a request names
one, and then it would put a stranger onto a slot that was restored a moment ago. So the router
names a slot in every request, and owns them: one request at a time has a slot on lease.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

_REMEMBERED_BYTES = 32 * 1024
_SIMILAR = 0.1  # the share of a prompt that must be cached for a slot to be preferred


@dataclass(slots=True)
class _Slot:
    number: int
    free: bool = True
    used: int = 0  # when, on the table's own clock: every use is one tick
    prompt: bytes = b""


@dataclass(slots=True)
class _Waiter:
    prompt: bytes
    everything: bool
    lease: asyncio.Future[Lease]


class Lease:
    """The right to use some slots, until it is given back."""

    def __init__(self, table: SlotTable, slots: list[_Slot]) -> None:
        self._table = table
        self._slots = slots

    @property
    def slot(self) -> int:
        """The slot's number; the first of several."""
        return self._slots[0].number

    @property
    def numbers(self) -> list[int]:
        """The numbers of all its slots; none once it was given back."""
        return [slot.number for slot in self._slots]

    def holds(self, prompt: bytes) -> None:
        """Its first slot holds this prompt from now on, as the client wrote it; the others none."""
        for slot in self._slots:
            slot.prompt = b""
        if self._slots:
            self._slots[0].prompt = prompt[:_REMEMBERED_BYTES]

    def give_back(self) -> None:
        """End the lease; once more is no error."""
        slots, self._slots = self._slots, []
        self._table.take_back(slots)


@dataclass(slots=True)
class SlotTable:
    """The slots of one server. Who comes first is served first."""

    count: int
    _slots: list[_Slot] = field(init=False)
    _waiting: deque[_Waiter] = field(default_factory=deque)
    _clock: int = 0

    def __post_init__(self) -> None:
        self._slots = [_Slot(number) for number in range(self.count)]

    @property
    def leased(self) -> int:
        """How many slots are in use."""
        return sum(not slot.free for slot in self._slots)

    @property
    def waiting(self) -> int:
        """How many wait for a slot."""
        return len(self._waiting)

    def take_idle(self) -> Lease:
        """All slots that nobody uses, at once and perhaps none: what they cache is in the way."""
        free = [slot for slot in self._slots if slot.free]
        return self._hand_out(free)

    async def lease(self, prompt: bytes = b"", *, everything: bool = False) -> Lease:
        """Wait for a slot, the one with the most of `prompt` where that is worth anything.

        `everything`: wait for all of them, for a request whose slots the server chooses.
        """
        waiter = _Waiter(prompt, everything, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        self._serve()
        try:
            return await waiter.lease
        except asyncio.CancelledError:
            if waiter.lease.done() and not waiter.lease.cancelled():
                waiter.lease.result().give_back()
            else:
                self._waiting.remove(waiter)
                self._serve()
            raise

    def take_back(self, slots: list[_Slot]) -> None:
        """A lease is over."""
        for slot in slots:
            self._clock += 1
            slot.free, slot.used = True, self._clock
        self._serve()

    def _serve(self) -> None:
        while self._waiting:
            waiter = self._waiting[0]
            free = [slot for slot in self._slots if slot.free]
            if not free or (waiter.everything and len(free) < self.count):
                return
            self._waiting.popleft()
            if waiter.lease.cancelled():
                continue
            taken = free if waiter.everything else [_choose(free, waiter.prompt)]
            waiter.lease.set_result(self._hand_out(taken))

    def _hand_out(self, slots: list[_Slot]) -> Lease:
        for slot in slots:
            slot.free = False
        return Lease(self, slots)


def _choose(free: list[_Slot], prompt: bytes) -> _Slot:
    oldest = min(free, key=lambda slot: slot.used)
    if not prompt:
        return oldest
    best = max(free, key=lambda slot: _same(slot.prompt, prompt))
    known = min(len(prompt), _REMEMBERED_BYTES)
    return best if _same(best.prompt, prompt) >= _SIMILAR * known else oldest


def _same(left: bytes, right: bytes) -> int:
    """Length of the common prefix."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[:middle] == right[:middle]:
            low = middle
        else:
            high = middle - 1
    return low
