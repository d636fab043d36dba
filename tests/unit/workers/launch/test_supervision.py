"""What becomes of a worker that ends, on a clock of the test's own."""

import random
from pathlib import Path

from workers.launch.backoff import Backoff
from workers.launch.errors import CannotStart
from workers.launch.supervision import Supervision

LOG = Path("logs") / "w.log"


class FakeRun:
    """A run that ends when it is told to."""

    def __init__(self, pid: int, *, ready: bool = True, code: int | None = None) -> None:
        self.pid = pid
        self.log_path = LOG
        self.is_ready = ready
        self.code = code
        self.said = "CUDA out of memory"
        self.killed = 0

    def exit_code(self) -> int | None:
        return self.code

    def ready(self) -> bool:
        return self.is_ready

    def last_line(self) -> str:
        return self.said

    def kill(self) -> None:
        self.killed += 1
        self.code = -9 if self.code is None else self.code


class Middle(random.Random):
    """Chance that changes nothing: the whole wait."""

    def uniform(self, a: float, b: float) -> float:
        return b


class Scene:
    """A worker `w` whose next runs are listed; None is a start that fails."""

    def __init__(self, *runs: FakeRun | None, start_timeout_s: float = 100.0) -> None:
        self.first = FakeRun(1)
        self.next_runs = list(runs)
        self.started_at_s: list[float] = []
        self.now_s = 0.0
        self.worker = Supervision(
            "w",
            self.first,
            self._start,
            Backoff(Middle(), first_s=1, most_s=8, steady_s=60),
            now_s=0.0,
            start_timeout_s=start_timeout_s,
        )

    def _start(self) -> FakeRun:
        self.started_at_s.append(self.now_s)
        run = self.next_runs.pop(0)
        if run is None:
            raise CannotStart("w", "Too many open files")
        return run

    def at(self, now_s: float) -> str:
        self.now_s = now_s
        return self.worker.look(now_s)

    def through(self, until_s: float) -> list[tuple[float, str]]:
        """Look twice a second; what was said and when."""
        said = []
        while self.now_s < until_s:
            line = self.at(self.now_s + 0.5)
            if line:
                said.append((self.now_s, line))
        return said


def test_a_worker_that_runs_is_left_alone() -> None:
    scene = Scene()
    assert scene.through(1000) == []
    assert scene.first.killed == 0


def test_an_end_is_one_line_and_the_next_run_comes_after_the_wait() -> None:
    second = FakeRun(2, ready=False)
    scene = Scene(second)
    scene.first.code = 3
    assert scene.at(100) == (
        "worker w ended with exit code 3: CUDA out of memory; it is started again in 1.0 s "
        f"(failure 1); its log is {LOG}"
    )
    assert scene.first.killed == 1  # for what it left behind
    assert scene.at(100.9) == ""
    assert scene.started_at_s == []
    assert scene.at(101) == ""
    assert scene.started_at_s == [101]
    assert scene.at(150) == ""
    second.is_ready = True
    assert scene.at(151) == "worker w is ready again (pid 2)"
    assert scene.at(152) == ""


def test_a_signal_and_silence_are_told_as_such() -> None:
    scene = Scene()
    scene.first.code, scene.first.said = -11, ""
    assert scene.at(1).startswith("worker w was ended by signal 11: it said nothing; ")
    scene = Scene()
    scene.first.code = 137  # what a shell makes of it; mostly the kernel, out of memory
    assert scene.at(1).startswith("worker w ended with exit code 137 (signal 9): CUDA out of ")


def test_a_worker_that_dies_at_once_never_spins() -> None:
    scene = Scene(*[FakeRun(n, code=1) for n in range(2, 2000)])
    scene.first.code = 1
    said = scene.through(3600)
    # 1 + 2 + 4 s, then every 8 s, each found half a second later
    assert 3600 / 9 < len(scene.started_at_s) < 3600 / 8
    assert len(said) == len(scene.started_at_s) + 1
    gaps = [b - a for a, b in zip(scene.started_at_s, scene.started_at_s[1:], strict=False)]
    assert gaps[:3] == [2.5, 4.5, 8.5]
    assert min(gaps[2:]) == 8.5


def test_one_that_ran_long_starts_again_soon() -> None:
    steady = FakeRun(3)
    scene = Scene(FakeRun(2, code=1), steady, FakeRun(4))
    scene.first.code = 1
    scene.through(20)
    assert scene.started_at_s == [1.5, 4]
    steady.code = 1
    assert "started again in 1.0 s (failure 1)" in scene.at(100)


def test_one_that_never_gets_ready_is_killed_and_tried_again() -> None:
    hung = FakeRun(2, ready=False)
    scene = Scene(hung, FakeRun(3), start_timeout_s=100)
    scene.first.code = 1
    said = scene.through(200)
    assert [line for _, line in said[1:]] == [
        "worker w did not answer /health within 100 s: CUDA out of memory; it is started again "
        f"in 2.0 s (failure 2); its log is {LOG}",
        "worker w is ready again (pid 3)",
    ]
    assert said[1][0] == scene.started_at_s[0] + 100.5
    assert hung.killed == 1


def test_a_start_that_fails_is_tried_again_too() -> None:
    scene = Scene(None, FakeRun(2))
    scene.first.code = 1
    said = [line for _, line in scene.through(10)]
    assert said[1].startswith("worker w cannot be started: Too many open files; ")
    assert "it is started again in 2.0 s (failure 2)" in said[1]
    assert said[2] == "worker w is ready again (pid 2)"
