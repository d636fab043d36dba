"""Hand-offs and worker servers over real sockets of this machine."""

import gc
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import torch

from workers.native.testing.handoff_link import HandoffLink
from workers.native.testing.served_worker import ServedWorker
from workers.native.testing.tiny_model import write_tiny_folder
from workers.native.testing.waiting import open_files, thread_names, until


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def quick_collector() -> Iterator[None]:
    """What was imported before is no garbage: looking through it takes a tenth of a second."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class Heard(logging.Filter):
    """Keeps what was logged as text: a kept record keeps its error, and that the pool."""

    def __init__(self) -> None:
        super().__init__()
        self.unexpected: list[str] = []

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR:
            self.unexpected.append(f"{record.getMessage()}: {record.exc_info}")
        return False


@pytest.fixture
def hand_off_log() -> Iterator[None]:
    """Whatever a peer does, it is expected: nothing is logged as an error."""
    log, heard = logging.getLogger("splitserve.handoff"), Heard()
    log.addFilter(heard)
    yield
    log.removeFilter(heard)
    assert heard.unexpected == []


@pytest.fixture
def make_link(hand_off_log: None, quick_collector: None) -> Iterator[Callable[..., HandoffLink]]:
    """Makes links; afterwards no thread, no descriptor and no offer may be left."""
    threads, files = thread_names("handoff"), open_files()
    made: list[HandoffLink] = []

    def make(*, start: bool = True, **shape: int) -> HandoffLink:
        made.append(HandoffLink(**shape))  # type: ignore[arg-type]
        if start:
            made[-1].server.start()
        return made[-1]

    yield make
    for link in made:
        link.close()
    until(lambda: thread_names("handoff") == threads, "hand-off threads end")
    gc.collect()  # a kept error holds its traceback, and that the pool
    until(lambda: open_files() <= files, "descriptors are closed")
    for link in made:
        assert link.offers.live == 0


@pytest.fixture
def link(make_link: Callable[..., HandoffLink]) -> HandoffLink:
    return make_link()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def http() -> Iterator[httpx.Client]:
    with httpx.Client(timeout=20) as client:
        yield client


def serving(worker: ServedWorker) -> Iterator[ServedWorker]:
    yield worker
    until(worker.idle, "all KV is free at the end")
    assert worker.engine.stats().failures == 0, "a step failed"
    worker.stop()
    until(lambda: thread_names("http", "engine", "handoff-accept") == [], "threads end")


@pytest.fixture(scope="module")
def worker(folder: Path) -> Iterator[ServedWorker]:
    yield from serving(ServedWorker(folder, kv_tokens=4096))


@pytest.fixture(autouse=True)
def every_test_leaves_it_idle(
    request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> Iterator[None]:
    yield
    errors = [r.getMessage() for r in caplog.get_records("call") if r.levelno >= logging.ERROR]
    assert errors == [] or "failing" in request.fixturenames
    if "worker" in request.fixturenames:
        left = request.getfixturevalue("worker")
        left.gate.release()
        until(left.idle, "nothing runs or holds KV after the test")
