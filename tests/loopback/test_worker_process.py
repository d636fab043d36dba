"""`python -m workers` and `splitserve worker`, up to the point where a model would be loaded."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

WAYS = (
    (sys.executable, "-m", "workers"),
    (sys.executable, "-c", "from router.cli import main; main()", "worker"),
)


@pytest.mark.parametrize("way", WAYS, ids=("module", "command"))
def test_a_port_in_use_is_one_line_before_the_model(way: tuple[str, ...], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        arguments = (f"--model={tmp_path}/nothing", f"--port={port}")
        done = subprocess.run(
            [*way, *arguments], capture_output=True, text=True, timeout=60, check=False
        )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == (
        f"error: port {port} on 127.0.0.1 cannot be used (Address already in use); "
        "stop what listens there or choose another with --port\n"
    )


def test_an_unknown_model_is_one_line(tmp_path: Path) -> None:
    arguments = (f"--model={tmp_path}/nothing", "--port=0")
    done = subprocess.run(
        [*WAYS[0], *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"error: model '{tmp_path}/nothing'")


def test_a_missing_gpu_is_one_line(tmp_path: Path) -> None:
    import torch

    if torch.cuda.device_count() >= 8:
        pytest.skip("this machine has the GPU that the test asks for")
    script = (
        "from unittest.mock import patch\n"
        "import sys, workers.native.model_store as store\n"
        "from workers.app import run\n"
        "from workers.settings import WorkerSettings\n"
        "with patch.object(store, 'resolve'), patch.object(store, 'model_hash'):\n"
        "    sys.exit(run(WorkerSettings(model='m', port=0, device='cuda:7')))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: device cuda:7: torch ")
    assert done.stderr.endswith("use --device cpu\n")
