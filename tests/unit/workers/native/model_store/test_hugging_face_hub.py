"""The real hub client against servers on loopback: one that serves, ones that do not."""

import hashlib
import http.server
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from workers.native.model_store.errors import HubUnavailableError
from workers.native.model_store.folder import missing_file
from workers.native.model_store.hub import HuggingFaceHub
from workers.native.testing.tiny_model import write_tiny_folder

COMMIT = "a" * 40


class SmallHub(http.server.ThreadingHTTPServer):
    """The three kinds of request that downloading a model takes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: SmallHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/org/tiny"):
            self._model(path, body)
        elif path.startswith(f"/org/tiny/resolve/{COMMIT}/"):
            file = self.server.folder / path.rpartition("/")[2]
            content = file.read_bytes()
            etag = hashlib.sha256(content).hexdigest()
            self._send(200, content, body, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT})
        else:
            self._send(404, b"{}", body, {"X-Error-Code": "RepoNotFound"})

    def _model(self, path: str, body: bool) -> None:
        files = [{"rfilename": file.name} for file in self.server.folder.iterdir()]
        tree = [
            {"type": "file", "path": f.name, "size": f.stat().st_size, "oid": "0" * 40}
            for f in self.server.folder.iterdir()
        ]
        info = {"id": "org/tiny", "sha": COMMIT, "siblings": files}
        answer = tree if "/tree/" in path else info
        self._send(200, json.dumps(answer).encode(), body, {"Content-Type": "application/json"})

    def _send(self, status: int, content: bytes, body: bool, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)


@pytest.fixture(autouse=True)
def _online(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf-cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)


@pytest.fixture
def small_hub(tmp_path: Path) -> Iterator[SmallHub]:
    server = SmallHub(write_tiny_folder(tmp_path / "served"))
    (server.folder / "pytorch_model.bin").write_bytes(b"not wanted")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_model_is_downloaded_whole(small_hub: SmallHub, tmp_path: Path) -> None:
    target = tmp_path / "target"
    HuggingFaceHub(small_hub.url).download("org/tiny", target)
    assert missing_file(target) is None
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (target / name).read_bytes() == (small_hub.folder / name).read_bytes()
    assert not (target / "pytorch_model.bin").exists()


def test_an_unknown_model_is_named(small_hub: SmallHub, tmp_path: Path) -> None:
    with pytest.raises(HubUnavailableError, match="no public model org/other; check the name"):
        HuggingFaceHub(small_hub.url).download("org/other", tmp_path / "target")


def test_a_hub_that_never_answers_does_not_hang(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hub = HuggingFaceHub(f"http://127.0.0.1:{silent.getsockname()[1]}", probe_deadline_s=0.5)
        begun_s = time.monotonic()
        with pytest.raises(HubUnavailableError, match="did not answer"):
            hub.download("org/tiny", tmp_path / "target")
        assert time.monotonic() - begun_s < 5


def test_a_closed_port_and_offline_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    hub = HuggingFaceHub(f"http://127.0.0.1:{port}")
    with pytest.raises(HubUnavailableError, match="name a local folder"):
        hub.download("org/tiny", tmp_path / "target")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubUnavailableError, match="HF_HUB_OFFLINE is set"):
        hub.download("org/tiny", tmp_path / "target")


def test_nothing_cached(tmp_path: Path) -> None:
    assert HuggingFaceHub().cached("org/never-downloaded") is None
