"""Policies decide when and where a request goes. Each is named by what it prefers."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from splitserve.scheduling.desk import Desk
from splitserve.scheduling.flight import Flight


class Policy(Protocol):
    """Empties the queue as far as it should be emptied now.

    `arrived` tells of a request that waits now, `left` of one that was cancelled while it waited;
    what `pump` itself starts or declines it knows. `pump` is called after every event. A policy
    keeps no clock and draws no random numbers but from a seeded `random.Random` of its own.
    """

    def arrived(self, flight: Flight, desk: Desk, now_s: float) -> None: ...

    def left(self, flight: Flight) -> None: ...

    def pump(self, desk: Desk, now_s: float) -> None: ...


@runtime_checkable
class Accountant(Protocol):
    """A policy that also wants to know what a request used that it had started.

    `ended` comes once, when the request is over however it ended: prompt tokens that were computed
    for it and tokens it was answered, as far as anybody has counted them.
    """

    def ended(self, flight: Flight, prompt_tokens: int, output_tokens: int) -> None: ...
