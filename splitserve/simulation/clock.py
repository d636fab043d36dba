"""Virtual time: what is to happen, in order."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class Clock:
    """Runs actions at their instants; those of one instant in the order in which they were set."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Action]] = []
        self._order = 0

    def at(self, when_s: float, action: Action) -> None:
        """Do something at `when_s`, or now if that is past."""
        self._order += 1
        heapq.heappush(self._heap, (max(when_s, self.now_s), self._order, action))

    def after(self, delay_s: float, action: Action) -> None:
        """Do something `delay_s` from now."""
        self.at(self.now_s + delay_s, action)

    def run(self, until_s: float, on_time: Callable[[float], None] | None = None) -> None:
        """Go on until nothing is left or the next instant lies beyond `until_s`."""
        heap = self._heap
        while heap and heap[0][0] <= until_s:
            self.now_s, _, action = heapq.heappop(heap)
            if on_time is not None:
                on_time(self.now_s)
            action()
