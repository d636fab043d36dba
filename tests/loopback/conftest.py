"""What the loopback tests share: a fake worker and a client of it, over real sockets."""

from collections.abc import AsyncIterator

import pytest

from router.testing.fake_openai import FakeOpenAI
from router.upstream import HttpUpstream


@pytest.fixture
async def fake() -> AsyncIterator[FakeOpenAI]:
    async with FakeOpenAI() as server:
        yield server


@pytest.fixture
async def upstream() -> AsyncIterator[HttpUpstream]:
    client = HttpUpstream()
    yield client
    client.close()
