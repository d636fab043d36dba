"""llama.cpp's own server: where it is found, how it is started, what it says about its speed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engines import llama_cpp_recipe
from benchmarks.engines.install import engines_dir
from benchmarks.errors import SystemFailed

VARIABLE = "SPLITSERVE_LLAMA_SERVER"
_START_TIMEOUT_S = 60.0
_REQUEST_TIMEOUT_S = 300.0
_POLL_S = 0.1


def find_server() -> Path | None:
    """What SPLITSERVE_LLAMA_SERVER names, else on the PATH, else where `make test-engines` puts it.

    None when it is nowhere. Raises SystemFailed when the variable names no file.
    """
    named = os.environ.get(VARIABLE)
    if named:
        if not Path(named).is_file():
            raise SystemFailed(
                f"llama-server: {VARIABLE} names {named}, which is no file; name the program there"
            )
        return Path(named)
    on_path = shutil.which("llama-server")
    if on_path is not None:
        return Path(on_path)
    folder = f"llama-cpp-{llama_cpp_recipe.VERSION}"
    installed = engines_dir() / folder / llama_cpp_recipe.PROGRAM
    return installed if installed.is_file() else None


@dataclass(frozen=True, slots=True)
class Running:
    """A server that answers."""

    url: str
    pid: int


def measure(
    server: Path,
    gguf: Path,
    threads: int,
    prompt_tokens: Mapping[str, int],
    *,
    answer_tokens: int,
    rounds: int = 3,
) -> dict[str, Any]:
    """Best of `rounds` of the speeds that the server reports, in tokens per second.

    It runs the GGUF file's quantised weights, so it reads far fewer bytes per token than an engine
    with float32 weights: `weight_file_bytes` says how many at most. Raises SystemFailed.
    """
    with running(server, gguf, threads) as url:
        decode = [
            _timings(url, prompt_tokens["decode"], answer_tokens)["predicted_per_second"]
            for _ in range(rounds)
        ]
        prefill = [
            _timings(url, prompt_tokens["prefill"], 1)["prompt_per_second"] for _ in range(rounds)
        ]
    return {
        "decode_tok_s": max(decode),
        "prefill_tok_s": max(prefill),
        "prefill_prompt_tokens": prompt_tokens["prefill"],
        "threads": threads,
        "weight_file": gguf.name,
        "weight_file_bytes": gguf.stat().st_size,
    }


@contextlib.contextmanager
def running(server: Path, gguf: Path, threads: int) -> Iterator[str]:
    """A server for one request at a time, ready; yields its URL and stops it afterwards."""
    flags = ("--ctx-size", "4096", "--parallel", "1")
    with started(server, gguf, threads, flags) as running_server:
        yield running_server.url


@contextlib.contextmanager
def started(server: Path, gguf: Path, threads: int, flags: Sequence[str]) -> Iterator[Running]:
    """A server with `flags` on a free loopback port, ready; stopped afterwards.

    Raises SystemFailed.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [str(server), "--model", str(gguf), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--threads", str(threads), "--threads-batch", str(threads), *flags]
    with _library_path(server) as library_path:
        process = subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "LD_LIBRARY_PATH": library_path},
        )
        url = f"http://127.0.0.1:{port}"
        try:
            _wait_ready(process, url)
            yield Running(url, process.pid)
        finally:
            _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.contextmanager
def _library_path(server: Path) -> Iterator[str]:
    """Where the program finds the shared libraries that lie beside it.

    A wheel cannot hold symbolic links; the package lists those it needs in `_symlinks.json`.
    """
    folder = server.resolve().parent
    listed = folder / "_symlinks.json"
    links = json.loads(listed.read_text(encoding="utf-8")) if listed.is_file() else {}
    with tempfile.TemporaryDirectory(prefix="llama-cpp-") as made:
        for name in links:
            target = name
            while target in links:
                target = links[target]
            (Path(made) / name).symlink_to(folder / target)
        known = (made, str(folder), os.environ.get("LD_LIBRARY_PATH", ""))
        yield ":".join(filter(None, known))


def post(url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """POST a JSON body, return the JSON answer. Raises SystemFailed."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=_REQUEST_TIMEOUT_S) as reply:
            answer: dict[str, Any] = json.load(reply)
    except (OSError, ValueError) as error:
        raise SystemFailed(f"llama-server: {url} failed ({error}); see its own log") from error
    return answer


def _wait_ready(process: subprocess.Popen[bytes], url: str) -> None:
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            raise SystemFailed(
                f"llama-server ended with status {process.returncode} before it was ready; "
                "start it by hand to see why"
            )
        if _healthy(url):
            return
        time.sleep(_POLL_S)
    raise SystemFailed(
        f"llama-server was not ready after {_START_TIMEOUT_S:g} s; try a smaller model"
    )


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=1) as reply:
            return int(reply.status) == 200
    except OSError:
        return False


def _timings(url: str, prompt_tokens: int, answer_tokens: int) -> dict[str, float]:
    """Its own figures for one random prompt, nothing of it cached."""
    draw = random.Random(prompt_tokens + answer_tokens)
    body = {
        "prompt": [draw.randrange(100, 40000) for _ in range(prompt_tokens)],
        "n_predict": answer_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": False,
    }
    timings: dict[str, float] = post(f"{url}/completion", body)["timings"]
    return timings
