"""An open-loop load client: requests leave at their scheduled times, whatever the answers do.

The clock of a request starts at its scheduled time, so a client that falls behind makes the system
look slower, never faster; how late requests left is reported as the send lag.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.errors import LoadFailed

PATH = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Arrival:
    """One streamed request. `at_s` counts from the start of the run."""

    at_s: float
    body: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answered:
    """What came of it, in seconds; times count from its scheduled time."""

    lag_s: float
    ttft_s: float
    e2e_s: float
    output_tokens: int

    @property
    def tpot_s(self) -> float | None:
        """Mean gap between tokens; None below two."""
        if self.output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1)


def client(base: str, timeout_s: float = 900.0) -> httpx.AsyncClient:
    """Return a client of a router at `base` that holds as many connections as it needs."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(base_url=base, timeout=timeout_s, limits=limits)


async def play(http: httpx.AsyncClient, arrivals: Sequence[Arrival]) -> list[Answered]:
    """Send every request at its time; return the answers in the order of `arrivals`.

    Raises LoadFailed for the first request that was not answered in full.
    """
    begin_s = asyncio.get_running_loop().time() + 0.2
    return list(await asyncio.gather(*(_one(http, each, begin_s) for each in arrivals)))


async def _one(http: httpx.AsyncClient, arrival: Arrival, begin_s: float) -> Answered:
    now_s = asyncio.get_running_loop().time
    due_s = begin_s + arrival.at_s
    await asyncio.sleep(max(0.0, due_s - now_s()))
    sent_s = now_s()
    times_s: list[float] = []
    done = False
    body, headers = {**arrival.body, "stream": True}, dict(arrival.headers)
    async with http.stream("POST", PATH, json=body, headers=headers) as response:
        if response.status_code != 200:
            text = (await response.aread())[:200].decode("utf-8", "replace")
            raise LoadFailed(f"a request was answered with HTTP {response.status_code}: {text}")
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith('data: {"error"'):
                raise LoadFailed(f"an answer broke off: {line[6:206]}")
            elif line.startswith("data: {"):
                times_s.append(now_s())
    if not times_s or not done:
        raise LoadFailed("an answer had no token or no end")
    return Answered(sent_s - due_s, times_s[0] - due_s, times_s[-1] - due_s, len(times_s))
