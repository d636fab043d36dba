"""What this machine can do at best: reading memory, and multiplying matrices."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

_BUFFER_FLOATS = 64 << 20  # 256 MiB, many times any cache
_SQUARES = (512, 1024, 2048)


@contextmanager
def torch_threads(threads: int) -> Iterator[None]:
    """Run torch with this many threads inside the block, in the calling thread."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure_read_bandwidth(threads: int, *, window_s: float = 0.3) -> float:
    """Bytes per second that `threads` threads read from memory, averaged over `window_s` seconds.

    Reads a 256 MiB buffer again and again with torch's vectorised float32 sum, which reads several
    sequential streams and writes nothing.
    """
    import torch

    with torch_threads(threads):
        buffer = torch.ones(_BUFFER_FLOATS)
        return buffer.numel() * buffer.element_size() / _mean_seconds(buffer.sum, window_s)


def measure_gemm_rate(
    dtype: torch.dtype, threads: int, *, squares: tuple[int, ...] = _SQUARES
) -> float:
    """Floating-point operations per second of `torch.mm`: the best of several square sizes."""
    import torch

    best = 0.0
    with torch_threads(threads):
        for size in squares:
            left, right = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
            out = torch.empty(size, size, dtype=dtype)

            def multiply(a: torch.Tensor = left, b: torch.Tensor = right) -> torch.Tensor:
                return torch.mm(a, b, out=out)  # noqa: B023  (used before the next turn)

            best = max(best, 2 * size**3 / _best_seconds(multiply, repeats=4))
    return best


def _mean_seconds(call: Callable[[], object], window_s: float) -> float:
    call()
    begun_s = time.perf_counter()
    calls = 0
    while True:
        call()
        calls += 1
        spent_s = time.perf_counter() - begun_s
        if spent_s >= window_s:
            return spent_s / calls


def _best_seconds(call: Callable[[], object], repeats: int) -> float:
    call()
    best = float("inf")
    for _ in range(repeats):
        begun_s = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begun_s)
    return best
