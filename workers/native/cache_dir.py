"""Where this machine's models and compiled kernels are kept."""

from __future__ import annotations

import os
from pathlib import Path


def default_cache_dir() -> Path:
    """`$SPLITSERVE_HOME`, else `~/.cache/splitserve`."""
    configured = os.environ.get("SPLITSERVE_HOME")
    return Path(configured) if configured else Path.home() / ".cache" / "splitserve"
