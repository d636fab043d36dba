"""Nothing outlives a supervisor that was killed with SIGKILL, which it cannot handle."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

SUPERVISOR = """
import os, sys, threading
from pathlib import Path
from workers.launch import Fleet, LaunchSpec
from workers.launch.guard import guarded

folder = Path(sys.argv[1])
server = folder / "server.py"
command = f"{sys.executable} {server} {{port}}"
specs = [
    LaunchSpec("guarded", guarded(command + " & wait", os.getpid())),
    LaunchSpec("watching", (sys.executable, str(server), "{port}", str(os.getpid()))),
]
with Fleet(specs, folder) as fleet:
    fleet.wait_ready()
    print(*(process.port for process in fleet.processes), flush=True)
    threading.Event().wait()
"""

SERVER = """
import http.server, signal, sys
from workers.parent import leave_with
if {stubborn}:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv) > 2:
    leave_with(int(sys.argv[2]))
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()
"""

LONGEST_S = 4.0  # two seconds are promised; the machine that runs this may be busy


@pytest.mark.parametrize("stubborn", [False, True])
def test_children_leave_with_a_killed_parent(tmp_path: Path, stubborn: bool) -> None:
    (tmp_path / "server.py").write_text(SERVER.format(stubborn=stubborn))
    supervisor = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    with supervisor:
        assert supervisor.stdout is not None
        ports = [int(port) for port in supervisor.stdout.readline().split()]
        connections = [socket.create_connection(("127.0.0.1", port)) for port in ports]
        supervisor.send_signal(signal.SIGKILL)
        killed_s = time.monotonic()
        for connection in connections:
            with connection:
                connection.settimeout(30)
                try:
                    assert connection.recv(1) == b""
                except ConnectionResetError:
                    continue
        assert len(ports) == 2
        assert time.monotonic() - killed_s < LONGEST_S
