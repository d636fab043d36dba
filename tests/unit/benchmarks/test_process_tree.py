"""Accounts of a child and of what it starts."""

import socket
import sys

import pytest

from benchmarks.errors import SystemFailed
from benchmarks.process_tree import ProcessTree, free_port

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")

BURN = "import time\nwhile time.process_time() < {burn_s}: pass\n"
SERVE = (
    "import http.server as h\n"
    "class H(h.BaseHTTPRequestHandler):\n"
    "    def do_GET(self): self.send_response(200); self.end_headers()\n"
    "    def log_message(self, *a): pass\n"
    "h.HTTPServer(('127.0.0.1', {port}), H).serve_forever()\n"
)
PARENT = "import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {child!r}]).wait()\n"


def test_cpu_and_memory_of_a_child_and_a_grandchild() -> None:
    port = free_port()
    child = BURN.format(burn_s=0.3) + SERVE.format(port=port)
    with ProcessTree("parent", [sys.executable, "-c", PARENT.format(child=child)]) as tree:
        tree.wait_ready(f"http://127.0.0.1:{port}/")
        assert 0.3 < tree.cpu_s() < 5
        assert tree.rss_bytes() > 2_000_000


def test_stopped_process_is_gone() -> None:
    port = free_port()
    command = [sys.executable, "-c", SERVE.format(port=port)]
    with ProcessTree("server", command) as tree:
        tree.wait_ready(f"http://127.0.0.1:{port}/")
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
        pass


def test_process_that_ends_is_reported_with_its_last_words() -> None:
    command = [sys.executable, "-c", "print('no such model'); raise SystemExit(3)"]
    with ProcessTree("server", command) as tree:
        with pytest.raises(SystemFailed, match="server ended with 3: no such model"):
            tree.wait_ready(f"http://127.0.0.1:{free_port()}/")


def test_process_that_never_gets_ready_is_reported() -> None:
    with ProcessTree("server", [sys.executable, "-c", "input()\nwhile True: pass"]) as tree:
        with pytest.raises(SystemFailed):
            tree.wait_ready(f"http://127.0.0.1:{free_port()}/", timeout_s=0.3)
