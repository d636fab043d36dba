"""Interactive requests under a flood of batch, live, on two native workers: `bench live-flood`.

Each policy gets a cluster of its own. First interactive requests alone, at their scheduled times;
then the same schedule again right after a dump of batch prompts. Reported: time to first token of
both, and whether every batch job finished.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.cluster import cluster
from benchmarks.open_loop import PATH, Arrival, client, play
from benchmarks.result import envelope

SCHEMA = "splitserve.bench.live-flood/1"
POLICIES = ("slack", "least-requests")
_MODEL = "smollm2-135m"


@dataclass(frozen=True, slots=True)
class Flood:
    """The load. Times in seconds, lengths in tokens."""

    interactive: int = 60
    every_s: float = 1.0
    prompt_tokens: int = 160
    output_tokens: int = 6
    batch_jobs: int = 200
    batch_prompt_tokens: int = 64
    batch_output_tokens: int = 8
    seed: int = 0


def run(*, flood: Flood | None = None, policies: Sequence[str] = POLICIES) -> dict[str, Any]:
    """Measure every policy and return one JSON document."""
    flood = flood or Flood()
    systems = {policy: _one(policy, flood) for policy in policies}
    return {**envelope(SCHEMA, "live-flood", seed=flood.seed), "systems": systems}


def _one(policy: str, flood: Flood) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "splitserve.yaml"
        config.write_text(
            f"policy: {policy}\n"
            "classes:\n"
            "  interactive: {ttft_ms: 2500, tpot_ms: 200}\n"
            "  batch: {deadline_s: 86400}\n",
            encoding="utf-8",
        )
        workers = ("--prefill", "0", "--decode", "0", "--aggregated", "2")
        with cluster("-c", str(config), "--model", _MODEL, *workers) as base:
            return asyncio.run(_phases(base, flood))


async def _phases(base: str, flood: Flood) -> dict[str, Any]:
    async with client(base) as http:
        draw = random.Random(flood.seed)
        await _interactive(http, flood, draw, count=6)  # warm the workers and the models
        alone = await _interactive(http, flood, draw, count=flood.interactive)
        started_s = time.perf_counter()
        batch = [asyncio.create_task(_batch(http, flood, draw)) for _ in range(flood.batch_jobs)]
        beside = await _interactive(http, flood, draw, count=flood.interactive)
        ends = await asyncio.gather(*batch)
    before, during = _figures(alone), _figures(beside)
    return {
        "alone_ttft_ms": before,
        "flood_ttft_ms": during,
        "p99_ratio": during["p99"] / before["p99"],
        "batch_done": sum(ends),
        "batch_jobs": flood.batch_jobs,
        "batch_s": time.perf_counter() - started_s,
    }


async def _interactive(
    http: httpx.AsyncClient, flood: Flood, draw: random.Random, *, count: int
) -> list[float]:
    """Send on schedule, whatever the answers do; the clock starts at the scheduled time."""
    arrivals = [
        Arrival(
            number * flood.every_s, _body(_prompt(draw, flood.prompt_tokens), flood.output_tokens)
        )
        for number in range(count)
    ]
    return [answer.ttft_s for answer in await play(http, arrivals)]


async def _batch(http: httpx.AsyncClient, flood: Flood, draw: random.Random) -> bool:
    body = _body(_prompt(draw, flood.batch_prompt_tokens), flood.batch_output_tokens)
    response = await http.post(PATH, json=body, headers={"x-slo-class": "batch"})
    if response.status_code != 200:
        return False
    return bool(response.json()["usage"]["completion_tokens"] == flood.batch_output_tokens)


def _prompt(draw: random.Random, tokens: int) -> list[int]:
    return [draw.randrange(1000, 40000) for _ in range(tokens)]


def _body(prompt: list[int], tokens: int) -> dict[str, Any]:
    return {
        "model": _MODEL,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


def _figures(values: list[float]) -> dict[str, float]:
    ordered = sorted(value * 1e3 for value in values)
    last = len(ordered) - 1
    ranks = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
    return {name: ordered[round(rank * last)] for name, rank in ranks.items()}
