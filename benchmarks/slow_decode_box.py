"""Time to first token with a prefill worker beside a slow decode box, against that box alone.

Two llama-servers with one thread each, the decode worker's held to a fraction of the time, a
courier beside each, and the router. Both plans are asked for in turn, one request at a time, with
prompts that nobody has seen. From shorter prompts it is known what a plan takes at once and per
token; the factor by which a split must win with the longer ones follows, and is compared with the
one that is measured. What the router expected, which learns from the same answers, is told too.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.cluster import get_json
from benchmarks.engines import llama_cpp
from benchmarks.engines.throttle import Throttle
from benchmarks.errors import LoadFailed, PeerMissing
from benchmarks.process_tree import ProcessTree, free_port
from benchmarks.result import envelope

SCHEMA = "splitserve.bench.slow-decode-box/1"
MODEL = "m"
_FLAGS = ("--kv-unified", "--no-cache-idle-slots", "--flash-attn", "on", "--metrics", "--no-ui")
_SIZE = ("--ctx-size", "4096", "--parallel", "2", "--alias", MODEL)
_PLANS = ("aggregated", "disaggregated")
_WARM_UP_TOKENS = (16, 80, 32, 56, 24, 40)
_WARM_UP_ANSWER_TOKENS, _ANSWER_TOKENS = 4, 2
_READY_S = 120.0
_TIMEOUT_S = 300.0


def run(
    gguf: Path,
    *,
    slowdown: float = 8.0,
    prompt_tokens: int = 128,
    rounds: int = 3,
    warm_up: int = 12,
    seed: int = 0,
) -> dict[str, Any]:
    """Measure and return one JSON document. Raises BenchmarkError.

    Factors are whole over split. `measured` is of the best of `rounds`, since what else runs on a
    machine only adds; `predicted` comes from the `warm_up` turns before them, of each length the
    best; `expected_by_router` is the router's own.
    """
    server = llama_cpp.find_server()
    if server is None:
        raise PeerMissing("llama-server is nowhere; run: python -m benchmarks.engines.install")
    draw = random.Random(seed)
    lengths = [_WARM_UP_TOKENS[number % len(_WARM_UP_TOKENS)] for number in range(warm_up)]
    with boxes(server, gguf, 1 / slowdown) as url:
        first = [_turn(url, draw, tokens, _WARM_UP_ANSWER_TOKENS) for tokens in lengths]
        turns = [_turn(url, draw, prompt_tokens, _ANSWER_TOKENS) for _ in range(rounds)]
    predicted_ms = {plan: extrapolate(_best(first, plan))(prompt_tokens) for plan in _PLANS}
    ttft_ms = {plan: _best(turns, plan)[0][1] for plan in _PLANS}
    expected_ms = {
        plan: float(statistics.median(turn[plan]["expected_ttft_ms"] for turn in turns))
        for plan in _PLANS
    }
    return envelope(SCHEMA, "slow-decode-box", seed=seed) | {
        "slowdown": slowdown,
        "prompt_tokens": prompt_tokens,
        "rounds": rounds,
        "ttft_ms": ttft_ms,
        "predicted_ttft_ms": predicted_ms,
        "expected_by_router_ttft_ms": expected_ms,
        "measured": _factor(ttft_ms),
        "predicted": _factor(predicted_ms),
        "expected_by_router": _factor(expected_ms),
        "turns": turns,
        "warm_up": first,
    }


def extrapolate(points: Sequence[tuple[float, float]]) -> Callable[[float], float]:
    """Return the line through (x, y) by the median of all slopes: a spoilt point moves it little.

    Needs two different x.
    """
    slopes = [
        (there - here) / (to - at)
        for (at, here), (to, there) in itertools.combinations(points, 2)
        if to != at
    ]
    slope = statistics.median(slopes)
    start = statistics.median(y - slope * x for x, y in points)
    return lambda x: start + slope * x


def _factor(by_plan: dict[str, float]) -> float:
    return by_plan["aggregated"] / by_plan["disaggregated"]


def _best(turns: list[dict[str, Any]], plan: str) -> list[tuple[int, float]]:
    """Of each prompt length the shortest time: (tokens, ms)."""
    best: dict[int, float] = {}
    for turn in turns:
        tokens, ms = turn[plan]["prompt_tokens"], turn[plan]["ttft_ms"]
        best[tokens] = min(ms, best.get(tokens, ms))
    return sorted(best.items())


@contextlib.contextmanager
def boxes(server: Path, gguf: Path, share: float) -> Iterator[str]:
    """Both boxes and the router before them; yields the router's address."""
    with contextlib.ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slow-decode-box-")))
        workers = []
        for name, role in (("p", "prefill"), ("d", "decode")):
            folder = home / name
            folder.mkdir()
            flags = (*_FLAGS, *_SIZE, "--slot-save-path", str(folder))
            box = stack.enter_context(llama_cpp.started(server, gguf, 1, flags))
            if role == "decode":
                stack.enter_context(Throttle(box.pid, share))
            courier = stack.enter_context(_courier(folder))
            workers.append({"url": box.url, "name": name, "role": role, "courier": courier})
        yield stack.enter_context(_router(home, workers))


@contextlib.contextmanager
def _courier(folder: Path) -> Iterator[str]:
    port = free_port()
    words = ("courier", "--folder", str(folder), "--port", str(port))
    with ProcessTree("courier", (sys.executable, "-m", "router", *words)) as process:
        url = f"http://127.0.0.1:{port}"
        process.wait_ready(f"{url}/health", _READY_S)
        yield url


@contextlib.contextmanager
def _router(home: Path, workers: list[dict[str, str]]) -> Iterator[str]:
    port = free_port()
    settings = {
        "listen": f"127.0.0.1:{port}",
        "workers": workers,
        "shadow_check": {"share": 0.0, "at_join": False},
        # Without targets: nothing is held back because a box is too slow for one.
        "classes": {"any": {}},
        "default_class": "any",
    }
    config = home / "splitserve.yaml"
    config.write_text(json.dumps(settings), encoding="utf-8")  # JSON is YAML
    with ProcessTree("router", (sys.executable, "-m", "router", "route", "-c", str(config))) as it:
        url = f"http://127.0.0.1:{port}"
        it.wait_ready(f"{url}/ready", _READY_S)
        _await_pair(url)
        yield url


def _await_pair(url: str) -> None:
    """Return once the two workers may exchange KV; which they are asked for when they are idle."""
    end_s = time.monotonic() + _READY_S
    while time.monotonic() < end_s:
        workers = get_json(f"{url}/admin/workers")["workers"]
        pairs = [pair for each in workers for pair in each.get("pairs", ())]
        if any(pair["ok"] for pair in pairs):
            return
        time.sleep(0.2)
    whys = {each["id"]: each.get("why_whole") or each["trouble"] for each in workers}
    raise LoadFailed(f"the boxes do not become a pair ({whys}); see the llama-servers' flags")


def _turn(
    url: str, draw: random.Random, prompt_tokens: int, answer_tokens: int
) -> dict[str, dict[str, Any]]:
    return {plan: _ask(url, plan, draw, prompt_tokens, answer_tokens) for plan in _PLANS}


def _ask(
    url: str, plan: str, draw: random.Random, prompt_tokens: int, answer_tokens: int
) -> dict[str, Any]:
    """One stream with a plan; both plans decode on the same box."""
    body = {
        "model": MODEL,
        "prompt": [draw.randrange(1000, 40000) for _ in range(prompt_tokens)],
        "max_tokens": answer_tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    headers = {"content-type": "application/json", "x-splitserve-plan": plan}
    if plan == "aggregated":
        headers["x-splitserve-worker"] = "d"
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=_TIMEOUT_S)
    connection.connect()
    started_s = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    response.read(1)
    ttft_ms = (time.perf_counter() - started_s) * 1e3
    rest = response.read()
    connection.close()
    if response.status != 200 or not rest.endswith(b"data: [DONE]\n\n"):
        raise LoadFailed(f"the router answered {response.status}: {rest[:300]!r}")
    record = get_json(f"{url}/admin/requests/{response.headers['x-splitserve-request-id']}")
    if record["failures"] or record["chosen"]["plan"] != plan:
        raise LoadFailed(f"a request was not served as asked: {record['failures']}")
    actual = record["actual"]
    return {
        "prompt_tokens": prompt_tokens,
        "ttft_ms": ttft_ms,
        "expected_ttft_ms": float(response.headers["x-splitserve-predicted-ttft-ms"]),
        "queue_ms": float(response.headers["x-splitserve-queue-ms"]),
        "prefill_ms": actual["prefill_ms"],
        "transfer_ms": actual["transfer_ms"],
        "recomputed_tokens": actual["recomputed_tokens"],
    }
