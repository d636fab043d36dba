"""`splitserve up` as a child process, for measurements that need a real cluster."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

from benchmarks.errors import BenchmarkError

_READY_S = 300.0
_STOP_S = 60.0


@contextlib.contextmanager
def cluster(*more: str) -> Iterator[str]:
    """Start prefill and decode workers and a router on free ports; yields the base URL.

    Raises BenchmarkError when it does not get ready; its own last words are on stderr then.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [sys.executable, "-m", "router", "up", "--port", str(port), *more]
    child = subprocess.Popen(words, stdout=subprocess.DEVNULL, start_new_session=True)
    base = f"http://127.0.0.1:{port}"
    try:
        _await_ready(base, child)
        yield base
    finally:
        child.send_signal(signal.SIGINT)
        try:
            child.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)


def _await_ready(base: str, child: subprocess.Popen[bytes]) -> None:
    for _ in range(int(_READY_S * 5)):
        with contextlib.suppress(OSError):
            get_json(f"{base}/ready")
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(0.2)
            break
    raise BenchmarkError("splitserve up did not get ready; its message is above")


def get_json(url: str) -> Any:
    """GET a small JSON document. Raises OSError."""
    with urllib.request.urlopen(url, timeout=30) as response:
        return json.loads(response.read())
