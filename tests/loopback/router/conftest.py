"""Every test here may leave nothing behind in the logs: no lost exception, no crashed request."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import uvloop

from router.testing.fake_native import FakeNative
from router.testing.loopback_router import LoopbackRouter, Split


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The router runs on uvloop."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
def tolerated() -> list[str]:
    """Texts of log errors that a test expects."""
    return []


@pytest.fixture(autouse=True)
def no_log_errors(caplog: pytest.LogCaptureFixture, tolerated: list[str]) -> Iterator[None]:
    yield
    errors = [
        record.getMessage()
        for record in caplog.get_records("call")
        if record.levelno >= logging.ERROR
    ]
    assert [e for e in errors if not any(text in e for text in tolerated)] == []


@pytest.fixture
async def split() -> AsyncIterator[Split]:
    """A router in front of one prefill and one decode worker, `p` and `d`."""
    async with FakeNative(role="prefill") as p, FakeNative(role="decode") as d:
        async with LoopbackRouter({"url": p.url, "name": "p"}, {"url": d.url, "name": "d"}) as r:
            yield Split(r, p, d)
