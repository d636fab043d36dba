"""The slow decode box: its line through noisy points, and a process that is held to its share."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from benchmarks.engines.throttle import Throttle
from benchmarks.slow_decode_box import extrapolate

BUSY = (
    "import sys, time\nwhile True:\n  sum(range(20_000)); sys.stdout.write('.'); sys.stdout.flush()"
)


def test_a_line_goes_through_exact_points() -> None:
    line = extrapolate([(1, 5), (2, 7), (4, 11)])
    assert line(10) == 23


def test_spoilt_points_move_the_line_little() -> None:
    points = [(float(x), 100 + 3.0 * x) for x in range(10)]
    points[4], points[7] = (4.0, 900.0), (7.0, 700.0)
    assert extrapolate(points)(20) == pytest.approx(160, rel=0.02)


def cpu_share(pid: int, seconds: float) -> float:
    clock = ~pid << 3 | 2
    begun_s, used_s = time.monotonic(), time.clock_gettime(clock)
    threading.Event().wait(seconds)
    return (time.clock_gettime(clock) - used_s) / (time.monotonic() - begun_s)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's CPU clocks")
def test_a_throttled_process_gets_its_share_and_is_let_go() -> None:
    command = [sys.executable, "-c", BUSY]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            with Throttle(process.pid, 1 / 8):
                assert cpu_share(process.pid, 1.0) < 0.25
            assert cpu_share(process.pid, 0.5) > 0
        finally:
            process.kill()


def test_a_throttle_outlives_its_process() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
        with Throttle(process.pid, 0.5):
            pass
