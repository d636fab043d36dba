"""sglang-router: where it is found, how it is installed and started."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from benchmarks.errors import PeerMissing

VERSION = "0.3.2"
INSTALL_TIMEOUT_S = 900


def command(python: str, port: int, metrics_port: int, workers: Sequence[str]) -> list[str]:
    """Its command line, at its default policy (cache_aware)."""
    where = ("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics_port))
    return [python, "-m", "sglang_router.launch_router", "--worker-urls", *workers, *where]


def find_python() -> str:
    """A Python that has sglang-router: this one, else one in an environment made once.

    Raises PeerMissing.
    """
    try:
        if metadata.version("sglang-router") == VERSION:
            return sys.executable
    except metadata.PackageNotFoundError:
        pass
    folder = _cache() / "peers" / f"sglang-router-{VERSION}"
    python = folder / "bin" / "python"
    done = folder / ".complete"
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        _call(sys.executable, "-m", "venv", str(folder))
        _call(str(python), "-m", "pip", "install", "--quiet", f"sglang-router=={VERSION}")
        done.touch()
    return str(python)


def _cache() -> Path:
    home = os.environ.get("SPLITSERVE_HOME")
    return Path(home) if home else Path.home() / ".cache" / "splitserve"


def _call(*words: str) -> None:
    try:
        subprocess.run(words, capture_output=True, text=True, check=True, timeout=INSTALL_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        raise PeerMissing(
            f"sglang-router {VERSION} cannot be installed ({said.strip().splitlines()[-1]});"
            " install it into an environment and name its python: --sglang-python PATH"
        ) from error
