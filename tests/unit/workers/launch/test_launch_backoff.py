"""How long a worker that ended waits for its next start."""

import random

import pytest

from workers.launch.backoff import Backoff


class Always(random.Random):
    """Chance that is always the same share."""

    def __init__(self, share: float) -> None:
        super().__init__(0)
        self.share = share

    def uniform(self, a: float, b: float) -> float:
        return a + (b - a) * self.share


def waits(backoff: Backoff, count: int, ready_s: float = 0.0) -> list[float]:
    return [backoff.next_s(ready_s) for _ in range(count)]


def test_waits_double_up_to_the_most() -> None:
    backoff = Backoff(Always(1.0), first_s=1, most_s=10)
    assert waits(backoff, 6) == [1, 2, 4, 8, 10, 10]
    assert backoff.failures == 6


def test_chance_takes_away_half_at_most() -> None:
    assert waits(Backoff(Always(0.0), first_s=1, most_s=10), 5) == [0.5, 1, 2, 4, 5]
    seeded = waits(Backoff(random.Random(7)), 50)
    assert len(set(seeded)) == 50
    assert all(0.5 <= each <= 60 for each in seeded)


def test_one_that_was_steady_begins_anew() -> None:
    backoff = Backoff(Always(1.0), steady_s=60)
    assert waits(backoff, 3, ready_s=59.9) == [1, 2, 4]
    assert backoff.next_s(ready_s=60) == 1
    assert backoff.next_s(ready_s=0) == 2


def test_starts_are_bounded_for_ever() -> None:
    backoff = Backoff(random.Random(1), most_s=60)
    assert sum(waits(backoff, 5000)) == pytest.approx(5000 * 45, rel=0.05)
