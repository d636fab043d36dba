"""Compiles `cpu_kernel.c`, once per machine and source text, and calls it."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from filelock import FileLock
from torch import Tensor

from workers.native.cache_dir import default_cache_dir
from workers.native.models.errors import KernelUnavailableError

PANEL_COLUMNS = 64
_SOURCE = Path(__file__).with_name("cpu_kernel.c")
_COMPILE_TIMEOUT_S = 60.0
_LOGGER = logging.getLogger(__name__)


class CpuKernel:
    """Products and norms of float32 CPU tensors.

    A row's result does not depend on the other rows, on their number or on the thread count.
    """

    def __init__(self, library: Path) -> None:
        """Raises OSError when the library does not load."""
        loaded = ctypes.CDLL(str(library))
        pointer, size, whole = ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int
        self._matmul = loaded.splitserve_panel_matmul
        self._matmul.argtypes = (
            *(pointer, size, pointer, size, size, pointer, size, size),
            *(whole, whole),
        )
        self._matmul.restype = None
        self._rms_norm = loaded.splitserve_rms_norm
        self._rms_norm.argtypes = (
            *(pointer, size, size, pointer, pointer, size, size, size),
            *(ctypes.c_float, whole),
        )
        self._rms_norm.restype = None
        self._attention = loaded.splitserve_paged_attention
        self._attention.argtypes = (
            *(pointer, size, pointer, pointer, size, size, pointer, pointer, size, size, size),
            *(pointer, size, pointer, size, size, size, size, size, ctypes.c_float),
            *(pointer, size, pointer, whole),
        )
        self._attention.restype = None

    def multiply(self, rows: Tensor, panels: Tensor, out: Tensor, *, accumulate: bool) -> None:
        """Write (or add, with `accumulate`) `rows` [T, in] times W to `out` [T, out].

        W is `panels` [out / 64, in, 64]. Rows and out may have any row stride; their columns must
        be contiguous.
        """
        self._matmul(
            rows.data_ptr(),
            rows.stride(0),
            panels.data_ptr(),
            panels.shape[1],
            panels.shape[0] * PANEL_COLUMNS,
            out.data_ptr(),
            out.stride(0),
            rows.shape[0],
            accumulate,
            torch.get_num_threads(),
        )

    def rms_norm(self, values: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise the last dimension of [T, width] or [T, heads, width]; a new tensor.

        The last dimension is contiguous and a multiple of 16 long.
        """
        heads = values.shape[1] if values.ndim == 3 else 1
        out = torch.empty(values.shape)
        self._rms_norm(
            values.data_ptr(),
            values.stride(0),
            values.stride(1) if values.ndim == 3 else 0,
            weight.data_ptr(),
            out.data_ptr(),
            values.shape[0],
            heads,
            values.shape[-1],
            eps,
            torch.get_num_threads(),
        )
        return out

    def attend_paged(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        pages: tuple[Tensor, Tensor],
        table: Tensor,
        lengths: Tensor,
        longest: int,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """Store one new token per sequence and attend from it to its sequence so far.

        query [N, heads, head_dim], key and value [N, kv_heads, head_dim], each row contiguous;
        `pages` are K and V of one layer, each [blocks, tokens, kv_heads, head_dim] with the last
        two contiguous. `table` int64 [N, blocks] and `lengths` int64 [N] (the new token included,
        at most `longest`) are contiguous. head_dim is a multiple of 16. Returns
        [N, heads * head_dim]; a sequence's result does not depend on the others.
        """
        count, heads, dim = query.shape
        stride = -(-longest // 16) * 16
        scores = torch.empty((count, heads, stride))
        out = torch.empty((count, heads * dim))
        keys, values = pages
        self._attention(
            *(query.data_ptr(), query.stride(0), key.data_ptr(), value.data_ptr()),
            *(key.stride(0), value.stride(0), keys.data_ptr(), values.data_ptr()),
            *(keys.stride(0), keys.stride(1), keys.shape[1]),
            *(table.data_ptr(), table.stride(0), lengths.data_ptr()),
            *(count, heads, key.shape[1], dim, window or 0, scale),
            *(scores.data_ptr(), stride, out.data_ptr(), torch.get_num_threads()),
        )
        return out


def load_cpu_kernel(cache_dir: Path | None = None) -> CpuKernel | None:
    """The compiled kernel, or None, with a line in the log, where there is no C compiler.

    Without it the engine works, but a decode step reads weights at about half the memory's rate.
    """
    try:
        return build_cpu_kernel((cache_dir or default_cache_dir()) / "kernels")
    except KernelUnavailableError as error:
        _LOGGER.warning("decode will be slow: %s", error)
        return None


def build_cpu_kernel(folder: Path) -> CpuKernel:
    """Compile into `folder` unless done before, and load. Raises KernelUnavailableError."""
    if sys.platform != "linux":
        raise KernelUnavailableError("the CPU kernel is built on Linux only; run the worker there")
    compiler = next(filter(shutil.which, (os.environ.get("CC", ""), "gcc", "cc")), None)
    if compiler is None:
        raise KernelUnavailableError("no C compiler found; install gcc or set CC")
    _share_openmp_with_torch()
    library = folder / f"cpu-{_key(compiler)}.so"
    try:
        if not library.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(library.with_suffix(".lock")):
                if not library.is_file():
                    _compile(compiler, library)
        kernel = CpuKernel(library)
    except OSError as error:
        raise KernelUnavailableError(
            f"{library} cannot be built or loaded ({error}); delete it or set SPLITSERVE_HOME"
        ) from error
    _check(kernel)
    return kernel


def _compile(compiler: str, library: Path) -> None:
    native = "-mcpu=native" if platform.machine() in {"aarch64", "arm64"} else "-march=native"
    built = library.with_suffix(f".{os.getpid()}")
    # Not linked to an OpenMP library: the one inside torch is in the process already.
    objects = built.with_suffix(".o")
    flags = ["-O3", native, "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-fopenmp"]
    try:
        _run([compiler, *flags, "-c", str(_SOURCE), "-o", str(objects)])
        _run([compiler, "-shared", str(objects), "-lm", "-o", str(built)])
        built.replace(library)
    finally:
        objects.unlink(missing_ok=True)
        built.unlink(missing_ok=True)


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_COMPILE_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise KernelUnavailableError(f"{command[0]} did not finish; set CC to another") from error
    if done.returncode != 0:
        first = (done.stderr.strip().splitlines() or ["no message"])[0]
        raise KernelUnavailableError(f"{command[0]} failed ({first}); set CC to a working gcc")


def _share_openmp_with_torch() -> None:
    """Two OpenMP thread pools in one process fight over the cores, so use torch's."""
    folder = Path(torch.__file__).parent / "lib"
    for library in sorted(folder.glob("libgomp*")):
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


def _key(compiler: str) -> str:
    """Changes with the source, the compiler and the processor's instruction set."""
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text(encoding="utf-8").splitlines() if cpu.is_file() else []
    features = sorted({line for line in lines if line.startswith(("flags", "Features"))})
    state = hashlib.blake2b(digest_size=8)
    for part in (_SOURCE.read_text(encoding="utf-8"), compiler, platform.machine(), *features):
        state.update(part.encode())
    return state.hexdigest()


def _check(kernel: CpuKernel) -> None:
    """A miscompiled kernel must not serve: compare small results with torch's."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(80, 5 * PANEL_COLUMNS, generator=generator)
    panels = weight.view(80, 5, PANEL_COLUMNS).transpose(0, 1).contiguous()
    for count in (1, 8):
        rows = torch.randn(count, 80, generator=generator)
        out = torch.ones(count, 5 * PANEL_COLUMNS)
        kernel.multiply(rows, panels, out, accumulate=True)
        product_right = torch.allclose(out, rows @ weight + 1, atol=1e-4)
        expected = torch.nn.functional.rms_norm(rows, (80,), weight[:, 0].contiguous(), 1e-5)
        norm_right = torch.allclose(
            kernel.rms_norm(rows, weight[:, 0].contiguous(), 1e-5), expected, atol=1e-5
        )
        if not (product_right and norm_right):
            raise KernelUnavailableError("the compiled CPU kernel computes wrong results; set CC")
