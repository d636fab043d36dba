"""vLLM's metrics, and what they say of promises."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.backends.prometheus_text import read_series
from router.backends.vllm_facts import VllmFacts
from router.backends.vllm_reuse import ReuseCheck

TEXT = b"""# HELP a_total Things.
# TYPE a_total counter
a_total{engine="0",source="x"} 3.0
a_total{engine="1",source="x"} 4.0
a_total{engine="0",source="y \\"z\\", {}"} 5.0
a_created{engine="0"} 1.7e+09
a_total_more 9
b 1.5
b_bucket{le="+Inf"} NaN
c{d="e"} +Inf 1700000000
"""


def test_series_are_found_by_name_and_labels() -> None:
    series = read_series(TEXT, ["a_total", "b", "missing"])
    assert len(series.samples) == 4
    assert series.total("a_total") == 12.0
    assert series.total("a_total", source="x") == 7.0
    assert series.total("a_total", source="x", engine="1") == 4.0
    assert series.of("a_total", engine="0")[1].labels["source"] == 'y "z", {}'
    assert series.total("b") == 1.5
    assert series.total("missing") == 0.0


def test_what_is_not_asked_for_is_not_read() -> None:
    assert read_series(TEXT + b"broken{ 1\n", ["b"]).total("b") == 1.5
    with pytest.raises(ValueError, match="convert string"):
        read_series(b"broken{ 1\n", ["broken"])


@pytest.mark.parametrize(
    "version,takes",
    [("0.9.2", False), ("0.10.0", True), ("0.32.0", True), ("1.0", True), ("dev", False)],
)
def test_versions_that_take_priorities(version: str, takes: bool) -> None:
    assert VllmFacts(version, ("m",)).takes_priority is takes


class Worker:
    """A decode worker's counter, with a router that watches it."""

    def __init__(self) -> None:
        self.check = ReuseCheck()
        self.counted = 1000.0
        self.poll()

    def poll(self) -> int:
        return self.check.settle(self.check.look(), self.counted)

    def answer(self, promised: int, used: int) -> None:
        self.check.begin()
        self.counted += used
        self.check.end()
        self.check.promise(promised)


def test_promises_that_were_kept_are_no_matter() -> None:
    worker = Worker()
    for _ in range(3):
        worker.answer(100, 100)
        assert [worker.poll(), worker.poll()] == [0, 0]


def test_a_shortfall_is_told_once_when_it_was_seen_twice() -> None:
    worker = Worker()
    worker.answer(100, 100)
    worker.answer(100, 30)
    assert [worker.poll() for _ in range(4)] == [0, 70, 0, 0]


def test_a_worker_that_counts_late_is_not_accused() -> None:
    worker = Worker()
    worker.answer(100, 0)
    assert worker.poll() == 0
    worker.counted += 100
    assert [worker.poll(), worker.poll()] == [0, 0]


def test_nothing_is_concluded_while_a_hand_off_is_under_way() -> None:
    worker = Worker()
    worker.answer(100, 0)
    worker.check.begin()
    assert [worker.poll(), worker.poll(), worker.poll()] == [0, 0, 0]
    worker.check.end()
    assert [worker.poll(), worker.poll()] == [0, 100]


def test_a_hand_off_that_begins_during_a_poll_spoils_it() -> None:
    worker = Worker()
    worker.answer(100, 0)
    assert worker.poll() == 0
    look = worker.check.look()
    worker.answer(50, 50)
    assert worker.check.settle(look, worker.counted) == 0
    assert worker.poll() == 100


def test_the_first_sight_of_a_counter_says_nothing() -> None:
    check = ReuseCheck()
    check.promise(100)
    assert check.settle(check.look(), 5.0) == 0
    assert check.settle(check.look(), 5.0) == 0


@given(
    st.lists(
        st.tuples(st.integers(0, 100), st.integers(0, 100), st.integers(0, 50), st.booleans()),
        max_size=30,
    )
)
def test_nobody_is_accused_of_more_than_was_computed_again(
    steps: list[tuple[int, int, int, bool]],
) -> None:
    worker, told, again = Worker(), 0, 0
    for promised, used, others, poll in steps:
        worker.answer(promised, min(promised, used))
        again += promised - min(promised, used)
        worker.counted += others
        if poll:
            told += worker.poll()
    told += worker.poll() + worker.poll()
    assert told <= again
    if not any(others for _, _, others, _ in steps):
        assert told == again
