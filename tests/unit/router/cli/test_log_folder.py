"""Where the logs of a run go, and which are kept."""

import os
from pathlib import Path

import pytest

from router.cli import stack
from router.cli.stack import log_folder


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SPLITSERVE_HOME", raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    return tmp_path


def test_logs_are_state_of_the_user(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert log_folder().parent == home / ".local" / "state" / "splitserve" / "logs"
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "xdg"))
    assert log_folder().parent == home / "xdg" / "splitserve" / "logs"
    monkeypatch.setenv("SPLITSERVE_HOME", str(home / "own"))
    assert log_folder().parent == home / "own" / "logs"


def test_each_run_has_its_own(home: Path) -> None:
    first, second = log_folder(), log_folder()
    assert first != second
    assert first.is_dir()
    assert second.is_dir()


def test_the_oldest_ended_runs_go_and_running_ones_stay(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stack, "_LOG_FOLDERS_KEPT", 2)
    logs = log_folder().parent  # of this process, which runs
    ended = [logs / f"2020010{day}-120000-abcd-4194305" for day in range(1, 6)]  # no such pid
    running = logs / f"20200101-110000-abcd-{os.getpid()}"
    foreign = logs / "20200106-120000-of-an-earlier-version"
    for folder in (*ended, running, foreign):
        folder.mkdir()
    kept = {*logs.iterdir(), log_folder()} & set(logs.iterdir())
    assert running in kept
    assert {each for each in (*ended, foreign) if each in kept} == {ended[-1], foreign}


def test_a_home_that_cannot_be_written_is_no_obstacle(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "file").touch()
    monkeypatch.setenv("SPLITSERVE_HOME", str(home / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(home))
    assert log_folder().name.startswith("splitserve-logs-")
