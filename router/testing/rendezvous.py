"""Where the two sides of fake SGLang requests meet: by the address of the prefill side, and a room.

It stands for the bootstrap servers and the network between them, and is as strict as SGLang: who
comes alone waits for its partner until it is told to give up, and a room takes one of each side.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

Side = Literal["prefill", "decode"]
Address = tuple[str, int]


class TransferFailed(Exception):
    """The KV does not come. Its text is what SGLang answers with."""


@dataclass(slots=True)
class Room:
    """One hand-off. `moved` is set once the prefill side has sent its KV."""

    number: int
    sides: set[Side] = field(default_factory=set)
    complete: asyncio.Event = field(default_factory=asyncio.Event)
    moved: asyncio.Event = field(default_factory=asyncio.Event)
    broken: str = ""


@dataclass(frozen=True, slots=True)
class Layout:
    """What both sides must have alike."""

    page_tokens: int
    kv_cache_dtype: str


class Rendezvous:
    """All prefill servers that may be reached, and the rooms in use."""

    def __init__(self, *, patience_s: float = 300.0) -> None:
        self.patience_s = patience_s
        self.servers: dict[Address, Layout] = {}
        self.rooms: dict[tuple[Address, int], Room] = {}
        self.met: list[int] = []
        """Rooms in which both sides were, in the order in which they met."""

    def alone(self, side: Side) -> int:
        """Rooms in which only this side waits."""
        return sum(room.sides == {side} for room in self.rooms.values())

    @contextlib.contextmanager
    def enter(
        self, side: Side, address: Address, numbers: list[int], layout: Layout
    ) -> Iterator[list[Room]]:
        """Be in these rooms for a while. Raises TransferFailed when that is refused."""
        known = self.servers.get(address)
        if known is None:
            raise TransferFailed(f"no bootstrap server answers at {address[0]}:{address[1]}")
        if known != layout:
            raise TransferFailed(f"KV layouts differ: {known} on prefill, {layout} on decode")
        rooms = [self._room(side, address, number) for number in numbers]
        try:
            yield rooms
        finally:
            for room in rooms:
                room.sides.discard(side)
                if not room.sides:
                    self.rooms.pop((address, room.number), None)

    def _room(self, side: Side, address: Address, number: int) -> Room:
        room = self.rooms.setdefault((address, number), Room(number))
        if side in room.sides or room.complete.is_set():
            raise TransferFailed(f"bootstrap_room {number} is in use")
        room.sides.add(side)
        if len(room.sides) == 2:
            self.met.append(number)
            room.complete.set()
        return room

    async def wait(self, event: asyncio.Event, room: Room) -> None:
        """Wait for the other side. Raises TransferFailed when it does not come, or has failed."""
        try:
            async with asyncio.timeout(self.patience_s):
                await event.wait()
        except TimeoutError:
            text = f"Request {room.number} timed out after {self.patience_s:g}s"
            raise TransferFailed(text) from None
        if room.broken:
            raise TransferFailed(room.broken)
