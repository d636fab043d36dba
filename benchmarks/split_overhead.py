"""What a split adds to the time to first token beyond its prefill and its transfer.

A client asks a real cluster (one prefill worker, one decode worker, a router) for streams, one at a
time, with prompts nobody has seen. Of each, the prefill worker's own time and the time spent moving
KV come from the decision record; the rest is HTTP twice, tokenising, scheduling, claiming, waking
and sampling.
"""

from __future__ import annotations

import http.client
import json
import random
import statistics
import time
from typing import Any
from urllib.parse import urlsplit

from benchmarks.cluster import cluster, get_json

PROMPT_TOKENS = (32, 128, 512)
_WARM_UP = 3


def run(*, model: str = "smollm2-135m", requests: int = 15, seed: int = 0) -> dict[str, Any]:
    """Return percentiles in milliseconds over `requests` split answers."""
    draw = random.Random(seed)
    with cluster("--model", model, "--prefill", "1", "--decode", "1") as base:
        rows = [_ask(base, model, draw, number) for number in range(_WARM_UP + requests)]
    rows = rows[_WARM_UP:]
    return {
        "requests": len(rows),
        "prompt_tokens": list(PROMPT_TOKENS),
        "ttft_ms": _percentiles([row["ttft_ms"] for row in rows]),
        "prefill_ms": _percentiles([row["prefill_ms"] for row in rows]),
        "transfer_ms": _percentiles([row["transfer_ms"] for row in rows]),
        "overhead_ms": _percentiles([row["overhead_ms"] for row in rows]),
    }


def _ask(base: str, model: str, draw: random.Random, number: int) -> dict[str, float]:
    tokens = PROMPT_TOKENS[number % len(PROMPT_TOKENS)]
    body = {
        "model": model,
        "prompt": [draw.randrange(1000, 40000) for _ in range(tokens)],
        "max_tokens": 4,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    parts = urlsplit(base)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=120)
    connection.connect()
    started_s = time.perf_counter()
    headers = {"content-type": "application/json", "x-splitserve-plan": "disaggregated"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    response.read(1)
    ttft_ms = (time.perf_counter() - started_s) * 1e3
    response.read()
    record = get_json(f"{base}/admin/requests/{response.headers['x-splitserve-request-id']}")
    connection.close()
    prefill_ms = float(record["actual"]["prefill_ms"])
    transfer_ms = float(record["actual"]["transfer_ms"])
    return {
        "ttft_ms": ttft_ms,
        "prefill_ms": prefill_ms,
        "transfer_ms": transfer_ms,
        "overhead_ms": ttft_ms - prefill_ms - transfer_ms,
    }


def _percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "p50": statistics.median(ordered),
        "p90": ordered[int(0.9 * (len(ordered) - 1))],
        "min": ordered[0],
        "max": ordered[-1],
    }
