"""`splitserve courier` from its start to its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from workers.launch.ports import free_ports

COMMAND = (sys.executable, "-m", "router", "courier")


def run(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **environ},
    )


@pytest.mark.parametrize(
    "words,said",
    [
        (("--folder", "nowhere"), "--folder: 'nowhere' cannot be used"),
        (("--folder", ".", "--host", "0.0.0.0"), "needs a key"),
        (("--folder", ".", "--key-env", "NO_SUCH_KEY"), "NO_SUCH_KEY is not set"),
        (("--folder", ".", "--peer", "box"), "--peer: 'box' cannot be used"),
        ((), "--folder"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(words: tuple[str, ...], said: str) -> None:
    done = run(*words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert said in done.stderr


def test_it_serves_until_it_is_told_to_end(tmp_path: Path) -> None:
    (port,) = free_ports(["127.0.0.1"])
    words = ("--folder", str(tmp_path), "--port", str(port), "--key-env", "COURIER_KEY")
    environ = {**os.environ, "COURIER_KEY": "secret"}
    with subprocess.Popen([*COMMAND, *words], stderr=subprocess.PIPE, env=environ) as process:
        assert process.stderr is not None
        try:
            assert b"courier of" in process.stderr.readline()
            transport = httpx.HTTPTransport(retries=20)  # it says so before it listens
            with httpx.Client(transport=transport, base_url=f"http://127.0.0.1:{port}") as client:
                assert client.get("/health").status_code == 200
                assert client.get("/profile").status_code == 401
                key = {"authorization": "Bearer secret"}
                assert client.get("/profile", headers=key).json()["used_bytes"] == 0
            taken = run("--folder", str(tmp_path), "--port", str(port))
            assert taken.returncode == 1
            assert "Address already in use" in taken.stderr
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        finally:
            process.kill()
