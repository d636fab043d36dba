"""Importing the light packages must not import the heavy ones."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "ray", "vllm", "transformers")
LIGHT = ("splitserve", "router", "router.cli", "workers", "benchmarks")


def heavy_after(statement: str) -> str:
    """The heavy packages a fresh interpreter holds after running `statement`."""
    report = f"import sys; print(*sorted(set({HEAVY}) & set(sys.modules)))"
    command = [sys.executable, "-c", f"{statement}; {report}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.parametrize("package", LIGHT)
def test_light_package_imports_nothing_heavy(package: str) -> None:
    assert heavy_after(f"import {package}") == ""


def test_heavy_import_is_seen() -> None:
    assert heavy_after("import sys; sys.modules['torch'] = sys") == "torch"
