"""CPU, latency and memory that a router adds, side by side with sglang-router over fake backends.

Each pass sends each shape through each system in turn, so that what else the machine does falls on
all of them alike: compare the systems of one run, not the figures of two runs.
"""

import argparse
import json
import random
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import uvloop
from rich.console import Console
from rich.progress import Progress

from benchmarks.closed_loop import ClosedLoop, Reply
from benchmarks.errors import LoadFailed
from benchmarks.peers import sglang_router
from benchmarks.process_tree import ProcessTree, free_port
from benchmarks.prompts import CHAT_PATH, chat_bodies
from benchmarks.result import envelope

SCHEMA = "splitserve.bench.relay/1"
MODEL = "m"
BACKENDS = 2
CONCURRENCY = 8
PASSES = 5
WARM_REQUESTS = 200
FIRST_CHUNK_ROUNDS = 4
FIRST_CHUNK_REQUESTS = 20
CHUNK_GAP_S = 0.001
"""Between two chunks of a backend's stream, so that none of them share a packet: a system that
reads several at once would look cheaper than it is under a real engine."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A kind of request. ``events`` are the SSE events of its answer, [DONE] included."""

    name: str
    prompt_bytes: int
    max_tokens: int
    stream: bool
    requests: int

    @property
    def events(self) -> int:
        return self.max_tokens + 1 if self.stream else 0

    def bodies(self, seed: int, count: int) -> list[bytes]:
        """Requests of this shape, no two alike."""
        endless = chat_bodies(
            seed,
            model=MODEL,
            prompt_bytes=self.prompt_bytes,
            max_tokens=self.max_tokens,
            stream=self.stream,
        )
        return list(islice(endless, count))


SHAPES = (
    Shape("plain", 1900, 16, False, 2000),
    Shape("stream32", 1900, 32, True, 400),
    Shape("prompt64k", 65_300, 16, False, 600),
)
STREAM = SHAPES[1]


@dataclass(slots=True)
class System:
    """One way to the backends and what was measured of it. ``tree`` is None for the direct way."""

    name: str
    url: str
    tree: ProcessTree | None
    cpu_ms: dict[str, list[float]] = field(default_factory=dict)
    requests_s: dict[str, list[float]] = field(default_factory=dict)
    first_chunk_ms: list[float] = field(default_factory=list)

    async def load(self, bodies: list[bytes], shape: Shape, concurrency: int) -> list[Reply]:
        """Raises LoadFailed for anything but the whole right answer, every time."""
        replies = await ClosedLoop(self.url, CHAT_PATH).run(bodies, concurrency)
        for reply in replies:
            if (
                reply.events != shape.events
                or f"w{shape.max_tokens - 1} ".encode() not in reply.body
            ):
                raise LoadFailed(f"{self.name} answered a {shape.name} request with {reply}")
        return replies


def run(
    *,
    seed: int = 0,
    passes: int = PASSES,
    sglang_python: str | None = None,
    router_command: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Measure direct, splitserve and sglang-router, and return the result.

    ``router_command`` replaces splitserve's own; ``{port}`` in a word is the port to listen on,
    and a word ``{workers}`` becomes the backends' URLs. Raises BenchmarkError.
    """
    with ExitStack() as stack, Progress(console=Console(stderr=True)) as progress:
        progress.console.print("starting backends and routers")
        systems = _start(stack, sglang_python, router_command)
        uvloop.run(_measure(systems, seed, passes, progress))
        figures = _figures(systems)
    settings = {
        "passes": passes,
        "concurrency": CONCURRENCY,
        "backends": BACKENDS,
        "chunk_gap_ms": CHUNK_GAP_S * 1e3,
        "requests": {shape.name: shape.requests for shape in SHAPES},
        "sglang_router": {"version": sglang_router.VERSION, "policy": "cache_aware"},
    }
    return {**envelope(SCHEMA, "relay", seed=seed), "settings": settings, "systems": figures}


def _start(
    stack: ExitStack, sglang_python: str | None, router_command: Sequence[str] | None
) -> list[System]:
    python = sglang_python or sglang_router.find_python()
    workers = []
    for number in range(BACKENDS):
        port = free_port()
        script = json.dumps({"chunk_delay_s": CHUNK_GAP_S})
        fake = (sys.executable, "-m", "router.testing.fake_openai", "--model", MODEL)
        tree = ProcessTree(f"backend-{number}", [*fake, "--port", str(port), "--script", script])
        stack.enter_context(tree).wait_ready(f"http://127.0.0.1:{port}/health")
        workers.append(f"http://127.0.0.1:{port}")
    port = free_port()
    ours = ProcessTree("splitserve", _our_command(router_command, port, workers))
    stack.enter_context(ours).wait_ready(f"http://127.0.0.1:{port}/ready")
    peer_port = free_port()
    command = sglang_router.command(python, peer_port, free_port(), workers)
    peer = ProcessTree("sglang-router", command)
    stack.enter_context(peer).wait_ready(f"http://127.0.0.1:{peer_port}/readiness")
    return [
        System("direct", workers[0], None),
        System("splitserve", f"http://127.0.0.1:{port}", ours),
        System("sglang-router", f"http://127.0.0.1:{peer_port}", peer),
    ]


def _our_command(template: Sequence[str] | None, port: int, workers: list[str]) -> list[str]:
    if template is None:
        main = (sys.executable, "-m", "router")
        named = [word for url in workers for word in ("--worker", url)]
        return [*main, "route", "--host", "127.0.0.1", "--port", str(port), *named]
    words: list[str] = []
    for word in template:
        words += workers if word == "{workers}" else [word.replace("{port}", str(port))]
    return words


async def _measure(systems: list[System], seed: int, passes: int, progress: Progress) -> None:
    seeds = random.Random(seed)
    routers = [system for system in systems if system.tree is not None]
    steps = progress.add_task("relay", total=(passes + 1) * (len(SHAPES) * len(routers) + 1))
    for number in range(passes + 1):  # the first pass warms up and is not kept
        for shape in SHAPES:
            for system in _turned(routers, number):
                progress.update(steps, advance=1, description=f"{shape.name}: {system.name}")
                count = shape.requests if number else WARM_REQUESTS
                bodies = shape.bodies(seeds.getrandbits(32), count)
                await _cpu_pass(system, shape, bodies, keep=number > 0)
        progress.update(steps, advance=1, description="first chunk")
        await _first_chunks(systems, seeds, number)


def _turned(systems: list[System], number: int) -> list[System]:
    """Another one begins in each pass."""
    start = number % len(systems)
    return systems[start:] + systems[:start]


async def _cpu_pass(system: System, shape: Shape, bodies: list[bytes], *, keep: bool) -> None:
    assert system.tree is not None
    before_s = system.tree.cpu_s()
    replies = await system.load(bodies, shape, CONCURRENCY)
    used_s = system.tree.cpu_s() - before_s
    if keep:
        system.cpu_ms.setdefault(shape.name, []).append(used_s / len(replies) * 1e3)
        busy_s = sum(reply.total_s for reply in replies) / CONCURRENCY
        system.requests_s.setdefault(shape.name, []).append(len(replies) / busy_s)


async def _first_chunks(systems: list[System], seeds: random.Random, number: int) -> None:
    for turn in range(FIRST_CHUNK_ROUNDS if number else 1):
        for system in _turned(systems, turn):
            bodies = STREAM.bodies(seeds.getrandbits(32), FIRST_CHUNK_REQUESTS + 1)
            replies = await system.load(bodies, STREAM, 1)
            if number:  # the first reply of a connection pays for the connection
                system.first_chunk_ms += [reply.first_byte_s * 1e3 for reply in replies[1:]]


def _figures(systems: list[System]) -> dict[str, Any]:
    direct = next(system for system in systems if system.tree is None)
    direct_ms = statistics.median(direct.first_chunk_ms)
    return {system.name: _system_figures(system, direct_ms) for system in systems}


def _system_figures(system: System, direct_ms: float) -> dict[str, Any]:
    """Medians over passes. ``added_ms`` is against the direct way's median, so the direct way's
    own p99 is the noise of the machine. The direct way has no CPU of its own to count.
    """
    first_ms = sorted(system.first_chunk_ms)
    added = {
        "p50": statistics.median(first_ms) - direct_ms,
        "p99": statistics.quantiles(first_ms, n=100)[98] - direct_ms,
    }
    if system.tree is None:
        return {"cpu_ms_per_request": None, "added_ms": added, "rss_mb": None}
    return {
        "cpu_ms_per_request": {n: statistics.median(v) for n, v in system.cpu_ms.items()},
        "cpu_ms_range": {n: [min(v), max(v)] for n, v in system.cpu_ms.items()},
        "requests_s": {n: statistics.median(v) for n, v in system.requests_s.items()},
        "added_ms": added,
        "rss_mb": system.tree.rss_bytes() / 1e6,
    }


def main() -> None:
    """Print the result as JSON."""
    parser = argparse.ArgumentParser(description="CPU per request, beside sglang-router.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--passes", type=int, default=PASSES)
    parser.add_argument(
        "--sglang-python", help=f"a python with sglang-router {sglang_router.VERSION}"
    )
    parser.add_argument(
        "router_command", nargs="*", help="replaces splitserve's; {port}, {workers}"
    )
    args = parser.parse_args()
    result = run(
        seed=args.seed,
        passes=args.passes,
        sglang_python=args.sglang_python,
        router_command=args.router_command or None,
    )
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
