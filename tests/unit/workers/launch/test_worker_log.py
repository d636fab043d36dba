"""A worker's log stays bounded, and tells of the last run only."""

from pathlib import Path

from workers.launch.worker_log import WorkerLog


def run(log: WorkerLog, text: str) -> None:
    with log.begin_run() as output:
        output.write(text.encode())


def test_runs_follow_each_other_and_the_last_one_is_told(tmp_path: Path) -> None:
    log = WorkerLog(tmp_path / "w.log")
    run(log, "loading\n\n  a   b  \nno such model\n")
    assert log.last_lines(1) == "no such model"
    assert log.last_lines(2) == "a b | no such model"
    run(log, "")
    assert log.last_lines(3) == ""
    run(log, "again\n")
    assert log.last_lines(3) == "again"
    assert log.path.read_text() == "loading\n\n  a   b  \nno such model\nagain\n"


def test_long_output_is_read_at_its_end_only(tmp_path: Path) -> None:
    log = WorkerLog(tmp_path / "w.log")
    run(log, "x" * 100_000 + "\nlast\n")
    assert len(log.tail()) == 8192
    assert log.last_lines(1) == "last"
    run(log, "y" * 100_000)
    assert log.last_lines(1) == "y" * 300


def test_a_log_that_grew_is_cut_under_the_writer(tmp_path: Path) -> None:
    path = tmp_path / "w.log"
    log = WorkerLog(path, most_bytes=1000)
    with log.begin_run() as output:
        for number in range(300):
            output.write(b"line %d\n" % number)
            output.flush()
            log.trim()
            assert path.stat().st_size <= 1000
    before = path.with_name("w.log.1")
    assert before.stat().st_size <= 1010
    assert sorted(p.name for p in tmp_path.iterdir()) == ["w.log", "w.log.1"]
    kept = (before.read_text() + path.read_text()).splitlines()
    assert kept == [f"line {number}" for number in range(300 - len(kept), 300)]
    assert log.last_lines(1) == "line 299"


def test_a_small_log_or_none_is_left_alone(tmp_path: Path) -> None:
    log = WorkerLog(tmp_path / "w.log", most_bytes=1000)
    log.trim()
    run(log, "short")
    log.trim()
    assert [p.name for p in tmp_path.iterdir()] == ["w.log"]
