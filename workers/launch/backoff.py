"""How long to wait before a worker that ended is started again."""

from __future__ import annotations

import random

_MOST_DOUBLINGS = 30


class Backoff:
    """Doubles the wait from `first_s` to `most_s` while a worker keeps failing.

    Half of each wait is chance, so that workers felled by one cause do not come back in step. One
    that had been ready for `steady_s` begins anew.
    """

    def __init__(
        self,
        chance: random.Random,
        *,
        first_s: float = 1.0,
        most_s: float = 60.0,
        steady_s: float = 60.0,
    ) -> None:
        self._chance = chance
        self._first_s = first_s
        self._most_s = most_s
        self._steady_s = steady_s
        self.failures = 0

    def next_s(self, ready_s: float) -> float:
        """Return the wait after a run that was ready for `ready_s` seconds, 0 for never."""
        if ready_s >= self._steady_s:
            self.failures = 0
        whole_s = min(self._most_s, self._first_s * 2.0 ** min(self.failures, _MOST_DOUBLINGS))
        self.failures += 1
        return whole_s * self._chance.uniform(0.5, 1.0)
