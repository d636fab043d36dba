"""Links between workers: one transfer at a time leaves a worker, one at a time enters another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from splitserve.simulation.clock import Clock
from splitserve.simulation.world import World

Landed = Callable[[float], None]  # told how long the transfer itself took, in seconds
Broken = Callable[[str], None]  # told why


@dataclass(eq=False, slots=True)
class _Transfer:
    source: str
    target: str
    broken: Broken
    over: bool = False


class Network:
    """Moves KV. Transfers that share an end wait for each other; a cut link breaks them."""

    def __init__(self, world: World, clock: Clock) -> None:
        self._world = world
        self._clock = clock
        self._free_s: dict[tuple[str, str], float] = {}
        self._cut: set[tuple[str, str]] = set()
        self._moving: list[_Transfer] = []

    def move(
        self, source: str, target: str, moved_bytes: float, landed: Landed, broken: Broken
    ) -> None:
        """Queue a transfer; exactly one of `landed` and `broken` is called, later."""
        transfer = _Transfer(source, target, broken)
        self._moving.append(transfer)
        if (source, target) in self._cut:
            self._clock.after(self._world.report_s, lambda: self._break(transfer, "link is down"))
            return
        ends = (("out", source), ("in", target))
        start_s = max(self._clock.now_s, *(self._free_s.get(end, 0.0) for end in ends))
        moving_s = moved_bytes / self._world.link_rate(source, target)
        for end in ends:
            self._free_s[end] = start_s + moving_s
        took_s = moving_s + self._world.link_latency_s
        self._clock.at(start_s + took_s, lambda: self._land(transfer, landed, took_s))

    def cut(self, source: str, target: str) -> None:
        """Break what moves between two workers, and let nothing new begin."""
        self._cut.add((source, target))
        self._break_all(lambda t: (t.source, t.target) == (source, target), "link went down")

    def mend(self, source: str, target: str) -> None:
        """Let transfers begin again."""
        self._cut.discard((source, target))

    def lost(self, worker_id: str) -> None:
        """A worker died: what it was sending or taking breaks."""
        self._break_all(lambda t: worker_id in (t.source, t.target), f"{worker_id} died")

    def _break_all(self, which: Callable[[_Transfer], bool], why: str) -> None:
        for transfer in [t for t in self._moving if which(t)]:
            self._break(transfer, why)

    def _break(self, transfer: _Transfer, why: str) -> None:
        if self._end(transfer):
            transfer.broken(why)

    def _land(self, transfer: _Transfer, landed: Landed, took_s: float) -> None:
        if self._end(transfer):
            landed(took_s)

    def _end(self, transfer: _Transfer) -> bool:
        if transfer.over:
            return False
        transfer.over = True
        self._moving.remove(transfer)
        return True
