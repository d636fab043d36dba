"""What every result carries, so that a figure can be traced to how it came about."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from pathlib import Path
from typing import Any


def envelope(schema: str, scenario: str, *, seed: int) -> dict[str, Any]:
    """Return schema, scenario, seed, commit, hardware and start time of a result."""
    return {
        "schema": schema,
        "scenario": scenario,
        "seed": seed,
        "commit": _commit(),
        "hardware": hardware(),
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def hardware() -> dict[str, Any]:
    """Describe this machine: processor, cores in use, memory, system."""
    page_bytes, pages = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_gb": round(page_bytes * pages / 1e9, 1),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")


def _commit() -> str:
    try:
        done = subprocess.run(
            ("git", "rev-parse", "--short=12", "HEAD"),
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()
