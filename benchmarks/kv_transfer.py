"""Hand-off speed against the bare link: `splitserve bench kv-transfer`.

Both ends run in processes of their own. The raw figure is one TCP connection on loopback that
moves the same number of bytes from one buffer into another with the same socket options; the
hand-off moves KV blocks out of one worker's pool into another's, with headers, heartbeats,
checksums on both sides and the final confirmation. The two alternate, so that they see the same
machine.
"""

from __future__ import annotations

import multiprocessing
import socket
import statistics
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from benchmarks import split_overhead
from benchmarks.result import envelope

SCHEMA = "splitserve.bench.kv-transfer/1"
_ROUNDS = 7
_RAW_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Shape:
    """KV of one prompt: SmolLM2-135M's layout in float32 unless said otherwise."""

    layers: int = 30
    kv_heads: int = 3
    head_dim: int = 64
    blocks: int = 192

    @property
    def tokens(self) -> int:
        """Tokens of the prompt, 16 a block."""
        return self.blocks * 16


def run(
    *, shape: Shape | None = None, rounds: int = _ROUNDS, with_cluster: bool = True
) -> dict[str, Any]:
    """Measure and return one JSON document.

    `with_cluster` adds what a split costs in time to first token, on a real cluster.
    """
    from benchmarks import kv_transfer_ends as ends

    shape = shape or Shape()
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    sender = context.Process(target=ends.serve_offers, args=(theirs, shape), daemon=True)
    sender.start()
    try:
        result = _measure(ours, shape, rounds)
    finally:
        ours.send(None)
        sender.join(10)
        if sender.is_alive():
            sender.kill()
    if with_cluster:
        result["split"] = split_overhead.run()
    return result


def _measure(control: Connection, shape: Shape, rounds: int) -> dict[str, Any]:
    from benchmarks import kv_transfer_ends as ends

    receiver = ends.Receiver(shape)
    samples: dict[str, list[float]] = {"raw": [], "tcp": [], "shared": []}
    size_bytes = receiver.size_bytes
    for turn in range(rounds + 1):
        seconds = {
            "raw": _raw_seconds(control, size_bytes),
            "tcp": receiver.pull_seconds(control, shared=False),
            "shared": receiver.pull_seconds(control, shared=True),
        }
        if turn:  # the first turn touches fresh memory
            for name, value in seconds.items():
                samples[name].append(value)
    median = {name: statistics.median(values) for name, values in samples.items()}
    ratios = [raw / tcp for raw, tcp in zip(samples["raw"], samples["tcp"], strict=True)]
    return {
        **envelope(SCHEMA, "kv-transfer", seed=0),
        "bytes": size_bytes,
        "tokens": shape.tokens,
        "rounds": rounds,
        "transfer_ms": median["tcp"] * 1e3,
        "link_mb_s": size_bytes / median["tcp"] / 1e6,
        "raw_link_mb_s": size_bytes / median["raw"] / 1e6,
        "ratio": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
        "shared_memory": {
            "transfer_ms": median["shared"] * 1e3,
            "mb_s": size_bytes / median["shared"] / 1e6,
        },
    }


def _raw_seconds(control: Connection, size_bytes: int) -> float:
    """Receive `size_bytes` over a bare TCP connection into one buffer that is used again."""
    control.send(("raw", size_bytes))
    port = control.recv()
    target = memoryview(bytearray(size_bytes))
    target[:] = bytes(size_bytes)  # touch it: page faults are not the link's
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        started_s = time.perf_counter()
        sock.sendall(b"!")
        got = 0
        while got < size_bytes:
            got += sock.recv_into(target[got : got + _RAW_PIECE_BYTES], 0, socket.MSG_WAITALL)
        return time.perf_counter() - started_s
