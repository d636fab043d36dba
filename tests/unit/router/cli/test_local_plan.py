"""Which processes `up` starts, and what the router is told of them."""

import os
from pathlib import Path

import pytest

from router.cli import local_workers
from router.cli.errors import CommandFailed, WrongUsage
from router.cli.local_workers import NativeWish, file_plan, native_plan
from router.settings import build
from splitserve.messages import Role


@pytest.fixture(autouse=True)
def resolved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(local_workers, "resolve_model", lambda name: tmp_path)
    monkeypatch.setattr(local_workers, "cores", lambda: 7)
    return tmp_path


def wish(prefill: int, decode: int, aggregated: int = 0, threads: int = 0) -> NativeWish:
    counts = {"prefill": prefill, "decode": decode, "aggregated": aggregated}
    return NativeWish("smollm2-135m", counts, threads)


def test_native_workers_share_the_cores_and_know_their_parent(resolved: Path) -> None:
    plan = native_plan(build({}), wish(2, 1))
    assert [launch.name for launch in plan.launches] == ["prefill-1", "prefill-2", "decode-1"]
    for launch in plan.launches:
        assert launch.command[1:4] == ("-P", "-m", "workers")
        for argument in (
            f"--model={resolved}",
            "--served-name=smollm2-135m",
            f"--role={launch.role}",
            "--threads=2",
            f"--parent-pid={os.getpid()}",
            "--port={port}",
        ):
            assert launch.command.count(argument) == 1
        assert launch.environment["OMP_NUM_THREADS"] == "2"


def test_more_workers_than_cores_get_one_thread_each() -> None:
    plan = native_plan(build({}), wish(5, 5))
    assert {launch.environment["OMP_NUM_THREADS"] for launch in plan.launches} == {"1"}


def test_threads_can_be_named() -> None:
    plan = native_plan(build({}), wish(1, 1, threads=5))
    assert all("--threads=5" in launch.command for launch in plan.launches)


def test_the_router_learns_addresses_names_and_the_model() -> None:
    settings = build({"listen": "127.0.0.1:8123", "limits": {"queue": 7}})
    plan = native_plan(settings, wish(1, 1))
    told = plan.with_addresses(["http://127.0.0.1:1001", "http://127.0.0.1:1002"])
    assert [(w.name, w.role, w.url, w.model) for w in told.worker_specs] == [
        ("prefill-1", Role.PREFILL, "http://127.0.0.1:1001", "smollm2-135m"),
        ("decode-1", Role.DECODE, "http://127.0.0.1:1002", "smollm2-135m"),
    ]
    assert told.listen == settings.listen
    assert told.limits == settings.limits


def test_workers_of_a_file_keep_their_place_and_get_names() -> None:
    settings = build(
        {
            "models": {
                "m": {
                    "workers": [
                        {"url": "http://a:1", "name": "decode-1"},
                        {"start": "sh serve --port {port}", "role": "decode"},
                    ]
                }
            },
            "workers": [
                {"start": "sh other {port}", "name": "mine", "start_timeout_s": 5},
                {"url": "http://b:2", "kv_events": "b:5557"},
            ],
        }
    )
    plan = file_plan(settings)
    assert [(launch.name, launch.command[-1]) for launch in plan.launches] == [
        ("decode-2", "sh serve --port {port}"),
        ("mine", "sh other {port}"),
    ]
    assert [launch.start_timeout_s for launch in plan.launches] == [600, 5]
    assert [launch.start_timeout_s for launch in plan.allowing(7).launches] == [7, 7]
    assert plan.allowing(None) is plan
    told = plan.with_addresses(["http://h:11", "http://h:12"]).worker_specs
    assert [(w.name, w.url, w.model) for w in told] == [
        ("decode-1", "http://a:1", "m"),
        ("decode-2", "http://h:11", "m"),
        ("mine", "http://h:12", None),
        (None, "http://b:2", None),
    ]


@pytest.mark.parametrize("counts", [(0, 0), (1, 0), (0, 1)])
def test_workers_that_cannot_answer_are_refused(counts: tuple[int, int]) -> None:
    with pytest.raises(WrongUsage, match="cannot answer a request; ask for"):
        wish(*counts).check()
    wish(*counts, aggregated=1).check()


def test_a_local_model_is_served_under_its_own_name(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (tmp_path / "other.Q4.gguf").touch()
    counts = {"aggregated": 1}
    assert NativeWish(str(folder) + "/", counts).served_name == "my-model"
    assert NativeWish(str(tmp_path / "other.Q4.gguf"), counts).served_name == "other.Q4"
    assert NativeWish("org/name", counts).served_name == "org/name"


def test_without_torch_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CommandFailed, match=r"pip install 'splitserve\[native\]'"):
        native_plan(build({}), wish(1, 1))
