"""Hand-offs that were for nothing: told in time, not too often, and ended after some in a row."""

from __future__ import annotations

import logging

import pytest

from router.dispatch import Dispatcher
from router.reuse import HOLD_S, IN_A_ROW, ReuseWatch
from router.telemetry.metrics import RouterMetrics
from router.telemetry.records import RecordStore
from splitserve import messages as m
from splitserve.scheduling import Scheduler


class Stage:
    """A watch over one pair, on a clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.scheduler = Scheduler()
        self.dispatcher = Dispatcher(
            self.scheduler, lambda: self.now_s, RecordStore(), RouterMetrics()
        )
        for name, role in (("p", m.Role.PREFILL), ("d", m.Role.DECODE)):
            snapshot = m.WorkerSnapshot(name, role, "fake", ("m",), "fake", "k")
            self.dispatcher.tell(m.WorkerReported(snapshot))
        self.watch = ReuseWatch(self.dispatcher)

    def saw(self, *tokens: int | None) -> None:
        for each in tokens:
            self.watch.saw("p", "d", each)

    @property
    def quarantined(self) -> bool:
        return ("p", "d") in self.scheduler.ledger.pairs.quarantined


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_several_in_a_row_quarantine_the_pair_for_a_while(stage: Stage) -> None:
    stage.saw(*[40] * (IN_A_ROW - 1))
    assert not stage.quarantined
    stage.saw(20)
    known = stage.scheduler.ledger.pairs.quarantined["p", "d"]
    assert known.reason == "hand-offs were computed again on d 3 times in a row (100 prompt tokens)"
    assert known.until_s == stage.now_s + HOLD_S
    stage.now_s += HOLD_S
    stage.dispatcher.tell(m.TimerFired())
    assert not stage.quarantined
    stage.saw(40)
    assert not stage.quarantined  # counted from the beginning


def test_one_that_was_used_ends_the_row(stage: Stage) -> None:
    for _ in range(5):
        stage.saw(*[40] * (IN_A_ROW - 1), 0)
    assert not stage.quarantined


def test_what_nobody_can_tell_counts_neither_way(stage: Stage) -> None:
    stage.saw(*[None] * 10)
    assert not stage.quarantined
    stage.saw(40, None, 40, None, 40)
    assert stage.quarantined


def test_what_only_counters_show_counts_too(stage: Stage) -> None:
    """The pairs that used the worker since its last look are meant, and no others."""
    for _ in range(IN_A_ROW):
        assert not stage.quarantined
        stage.saw(None)
        stage.watch.saw_counters("d", 40)
        stage.watch.saw_counters("other", 40)
        stage.now_s += 1
    assert stage.quarantined
    assert len(stage.watch) == 1


def test_looks_that_are_far_apart_are_no_row(stage: Stage) -> None:
    for _ in range(10):
        stage.saw(None)
        stage.watch.saw_counters("d", 40)
        stage.now_s += 121
    assert not stage.quarantined


def test_a_look_without_a_hand_off_is_on_nobody(stage: Stage) -> None:
    for _ in range(10):
        stage.watch.saw_counters("d", 40)
    assert len(stage.watch) == 0


def test_log_lines_name_the_pair_and_are_few(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "splitserve.reuse"):
        for _ in range(20):
            stage.saw(40, 0)
        assert len(caplog.messages) == 1
        assert caplog.messages[0].startswith("p -> d: 40 prompt tokens were handed over and comp")
        stage.now_s += 61
        stage.saw(50)
    assert len(caplog.messages) == 2
    assert "50 prompt tokens" in caplog.messages[1]
    assert caplog.messages[1].endswith("since the last line: 20)")


def test_pairs_that_are_remembered_are_bounded(stage: Stage) -> None:
    for number in range(3000):
        stage.watch.saw(f"p{number}", "d", 1)
    assert len(stage.watch) == 1024
