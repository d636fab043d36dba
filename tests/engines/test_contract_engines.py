"""The contract of tests/contract, held by real engines: unchanged tests, nothing scripted.

Each engine serves whole requests, behind a router of its own for every test.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from router.testing.contract import Served
from router.testing.loopback_router import LoopbackRouter
from tests.contract.test_generation_contract import *  # noqa: F403
from tests.contract.test_openai_contract import *  # noqa: F403
from tests.contract.test_router_contract import *  # noqa: F403
from tests.contract.test_sdk_contract import *  # noqa: F403

ANEW = (
    re.compile(rb'(?<="id":)\s*"(chatcmpl|cmpl)-[\w-]+"'),
    re.compile(rb'(?<="created":)\s*\d+'),
    re.compile(rb'(?<="cached_tokens":)\s*\d+'),
)
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class RealEngine:
    """A fixture that gives an engine's address, and what that engine makes up for each answer."""

    fixture: str
    name: str
    anew: tuple[re.Pattern[bytes], ...] = ANEW


ENGINES = (
    RealEngine("native_whole", "native"),
    RealEngine("vllm_whole", "vllm"),
    RealEngine("llama_whole", "llama.cpp", (*ANEW, re.compile(rb'(?<="timings":)\{[^}]*\}'))),
)


@pytest.fixture(params=ENGINES, ids=[engine.name for engine in ENGINES])
async def served(request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    engine: RealEngine = request.param
    url = request.getfixturevalue(engine.fixture)
    worker = {"url": url, "name": "one"}
    async with LoopbackRouter(worker, timeout_s=TIMEOUT_S, report_interval_s=5.0) as router:
        found = router.app.registry.members["one"].snapshot
        assert found is not None
        assert found.engine == engine.name
        yield Served(router, url, found.models[0], "aggregated", anew=engine.anew, recuts=True)
        await router.idle()
