"""vLLM on CPUs, one or several of them: where its Python is, what it is started with, its end.

    with running([VllmSpec("p", kv=nixl_pull("kv_producer"))], model) as (p,):
        ...                                  # p.url answers

Needs about 2 GB a server, and half a minute of two cores to start two side by side. With NIXL a
thread of each polls for as long as it runs: two servers keep two cores busy while nobody asks them.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.engines.install import engines_dir, recipes
from benchmarks.errors import SystemFailed
from benchmarks.process_tree import ProcessTree, free_port

START_TIMEOUT_S = 300.0
_HOST = "127.0.0.1"
_ENVIRONMENT = {
    # One process fewer a server: it starts in half the time, and needs 0.8 GB less.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": _HOST,
}


@dataclass(frozen=True, slots=True)
class VllmSpec:
    """One server to start. `kv` is its `--kv-transfer-config`, {} for none.

    With `caches_prefixes` False each request's tokens are computed, or come from another worker.
    """

    name: str
    kv: Mapping[str, Any] = field(default_factory=dict)
    block_tokens: int = 32
    context_tokens: int = 1024
    kv_bytes: int = 128 << 20
    max_running: int = 4
    caches_prefixes: bool = False
    flags: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class VllmServer:
    """One that answers, and where its NIXL side channel would be."""

    spec: VllmSpec
    url: str
    side_channel: str


def nixl(
    role: str, *, push: bool = False, lease_s: int = 30, engine_id: str = ""
) -> dict[str, Any]:
    """`--kv-transfer-config` of NIXL; `role` is kv_producer or kv_consumer.

    A pull that fails is answered by computing the prompt, which the router finds out and counts.
    """
    config: dict[str, Any] = {
        "kv_connector": "NixlPushConnector" if push else "NixlConnector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kv_lease_duration": lease_s},
    }
    return {**config, "engine_id": engine_id} if engine_id else config


def example(role: str, folder: Path) -> dict[str, Any]:
    """`--kv-transfer-config` of the files connector."""
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }


def find_python() -> Path:
    """The Python that has vLLM. Raises SystemFailed."""
    recipe = recipes("")["vllm"]
    named = os.environ.get(recipe.variable)
    path = Path(named) if named else engines_dir() / recipe.folder / recipe.program
    if not path.is_file():
        raise SystemFailed(
            f"vLLM: there is no {path}; run python -m benchmarks.engines.install, or name a Python "
            f"that has vLLM in {recipe.variable}"
        )
    return path


@contextlib.contextmanager
def running(
    specs: Sequence[VllmSpec], model: Path, served_name: str
) -> Iterator[tuple[VllmServer, ...]]:
    """Start servers side by side, wait until all answer, and end them. Raises SystemFailed."""
    python = find_python()
    with contextlib.ExitStack() as stack:
        started: list[tuple[ProcessTree, VllmServer]] = []
        for spec in specs:
            port, side_port = free_port(), free_port()
            command = _command(python, spec, model, served_name, port)
            environ = {**_ENVIRONMENT, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port)}
            process = stack.enter_context(ProcessTree(f"vllm-{spec.name}", command, environ))
            server = VllmServer(spec, f"http://{_HOST}:{port}", f"{_HOST}:{side_port}")
            started.append((process, server))
        for process, server in started:
            process.wait_ready(f"{server.url}/health", START_TIMEOUT_S)
        yield tuple(server for _, server in started)


def _command(python: Path, spec: VllmSpec, model: Path, served_name: str, port: int) -> list[str]:
    """Whole prompts in one step, since the files connector saves none that takes several."""
    cache = "--enable-prefix-caching" if spec.caches_prefixes else "--no-enable-prefix-caching"
    command = [
        *(str(python), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(model), "--served-model-name", served_name),
        *("--host", _HOST, "--port", str(port)),
        *("--enforce-eager", "--dtype", "bfloat16", cache),
        *("--distributed-executor-backend", "uni"),
        *("--max-model-len", str(spec.context_tokens), "--block-size", str(spec.block_tokens)),
        *("--max-num-batched-tokens", str(max(2048, spec.context_tokens))),
        *("--max-num-seqs", str(spec.max_running)),
        *("--kv-cache-memory-bytes", str(spec.kv_bytes)),
        *spec.flags,
    ]
    return [*command, "--kv-transfer-config", json.dumps(spec.kv)] if spec.kv else command
