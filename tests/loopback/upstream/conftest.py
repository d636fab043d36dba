"""The client is tested on the event loop of the standard library and on the one that serves."""

import asyncio
from collections.abc import Callable

import uvloop


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run every test of this folder on each."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
