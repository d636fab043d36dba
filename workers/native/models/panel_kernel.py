"""Compiles and loads `panel_matmul.c`, once per machine and source text."""

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
_SOURCE = Path(__file__).with_name("panel_matmul.c")
_SYMBOL = "splitserve_panel_matmul"
_COMPILE_TIMEOUT_S = 60.0
_LOGGER = logging.getLogger(__name__)


class PanelKernel:
    """y = x W on float32 CPU tensors with W stored as panels [out / 64, in, 64].

    A row's result does not depend on the other rows, on their number or on the thread count.
    """

    def __init__(self, library: Path) -> None:
        """Raises OSError when the library does not load."""
        function = getattr(ctypes.CDLL(str(library)), _SYMBOL)
        pointer, size = ctypes.c_void_p, ctypes.c_ssize_t
        function.argtypes = (
            *(pointer, size, pointer, size, size, pointer, size, size),
            *(ctypes.c_int, ctypes.c_int),
        )
        function.restype = None
        self._function = function

    def multiply(self, rows: Tensor, panels: Tensor, out: Tensor, *, accumulate: bool) -> None:
        """Write (or add, with `accumulate`) `rows` [T, in] times `panels` to `out` [T, out].

        Rows and out may have any row stride; their columns must be contiguous.
        """
        self._function(
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


def load_panel_kernel(cache_dir: Path | None = None) -> PanelKernel | None:
    """The compiled kernel, or None, with a line in the log, where there is no C compiler.

    Without it the engine works, but a decode step reads weights at about half the memory's rate.
    """
    try:
        return build_panel_kernel((cache_dir or default_cache_dir()) / "kernels")
    except KernelUnavailableError as error:
        _LOGGER.warning("decode will be slow: %s", error)
        return None


def build_panel_kernel(folder: Path) -> PanelKernel:
    """Compile into `folder` unless done before, and load. Raises KernelUnavailableError."""
    if sys.platform != "linux":
        raise KernelUnavailableError("the CPU kernel is built on Linux only; run the worker there")
    compiler = next(filter(shutil.which, (os.environ.get("CC", ""), "gcc", "cc")), None)
    if compiler is None:
        raise KernelUnavailableError("no C compiler found; install gcc or set CC")
    _share_openmp_with_torch()
    library = folder / f"panel-{_key(compiler)}.so"
    try:
        if not library.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            with FileLock(library.with_suffix(".lock")):
                if not library.is_file():
                    _compile(compiler, library)
        kernel = PanelKernel(library)
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
        _run([compiler, "-shared", str(objects), "-o", str(built)])
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


def _check(kernel: PanelKernel) -> None:
    """A miscompiled kernel must not serve: compare one small product with torch's."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(7, 40, generator=generator)
    weight = torch.randn(40, 2 * PANEL_COLUMNS, generator=generator)
    panels = weight.view(40, 2, PANEL_COLUMNS).transpose(0, 1).contiguous()
    out = torch.ones(7, 2 * PANEL_COLUMNS)
    kernel.multiply(rows, panels, out, accumulate=True)
    if not torch.allclose(out, rows @ weight + 1, atol=1e-4):
        raise KernelUnavailableError("the compiled CPU kernel computes wrong results; set CC")
