"""The commands of an installation, one after another: logged, and told of while they run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.errors import InstallFailed

_TELL_EVERY_S = 20.0
_TAIL_LINES = 200
_SHOWN_CHARACTERS = 100
_MISSING_PACKAGE = re.compile(r"No matching distribution found for ([^\s;]+)")


class BuildSteps:
    """Runs commands for one engine; their whole output goes into `log_path`."""

    def __init__(self, engine: str, log_path: Path, say: Callable[[str], None]) -> None:
        self._engine = engine
        self._log_path = log_path
        self._say = say

    def __enter__(self) -> Self:
        self._log = self._log_path.open("w", encoding="utf-8")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._log.close()

    def run(
        self, what: str, command: Iterable[object], environ: Mapping[str, str] | None = None
    ) -> None:
        """Run a command, of words and paths, to its end, telling now and then where it is.

        Raises InstallFailed.
        """
        words = [str(word) for word in command]
        self._say(what)
        self._log.write(f"$ {shlex.join(words)}\n")
        tail: deque[str] = deque(maxlen=_TAIL_LINES)
        began_s = told_s = time.monotonic()
        try:
            process = subprocess.Popen(
                words,
                env={**os.environ, **(environ or {})},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
        except OSError as error:
            raise InstallFailed(f"{self._engine}: {what}: {error}; install that program") from error
        with process:
            assert process.stdout is not None
            for line in process.stdout:
                self._log.write(line)
                tail.append(line.strip())
                if time.monotonic() - told_s > _TELL_EVERY_S:
                    told_s = time.monotonic()
                    self._say(f"{told_s - began_s:.0f} s: {line.strip()[:_SHOWN_CHARACTERS]}")
        self._log.flush()
        if process.returncode != 0:
            raise InstallFailed(f"{self._engine}: {self._why(what, process.returncode, tail)}")

    def _why(self, what: str, status: int, tail: Sequence[str]) -> str:
        missing = next(filter(None, map(_MISSING_PACKAGE.search, tail)), None)
        if missing is not None:
            return (
                f"{what}: no package index of this pip has {missing[1]} for this Python; name one "
                "that has it in PIP_EXTRA_INDEX_URL (torch: in TORCH, see the Makefile)"
            )
        said = [line for line in tail if "error" in line.lower()] or list(tail)
        return (
            f"{what} ended with status {status}: {said[-1] if said else 'it said nothing'}; "
            f"its output is in {self._log_path}"
        )
