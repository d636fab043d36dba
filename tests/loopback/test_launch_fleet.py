"""Local processes that start together and end together, with real children."""

import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from workers.launch import Fleet, LaunchSpec, LocalProcess
from workers.launch.backoff import Backoff
from workers.launch.errors import CannotStart, NotReady, PortTaken, WorkerExited
from workers.launch.guard import guarded
from workers.launch.ports import free_ports, require_free

SERVER = """
import http.server, signal, sys
{before}
class Health(http.server.BaseHTTPRequestHandler):
    log_message = lambda *_: None
    def do_GET(self):
        self.send_response({status} if self.path == "/health" else 404)
        self.end_headers()
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()
"""


def server(name: str, before: str = "", status: int = 200) -> LaunchSpec:
    script = SERVER.format(before=before, status=status)
    return LaunchSpec(name, (sys.executable, "-c", script, "{port}"), start_timeout_s=30)


def exits(name: str, script: str) -> LaunchSpec:
    return LaunchSpec(name, (sys.executable, "-c", script, "{port}"))


def started(fleet: Fleet) -> None:
    """Start a fleet, wait until it is ready, and end it."""
    with fleet:
        fleet.wait_ready()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def connect(process: LocalProcess) -> socket.socket:
    """A connection whose end tells that the listening process is gone."""
    return socket.create_connection(("127.0.0.1", process.port), timeout=10)


def closed(connection: socket.socket) -> bool:
    """Wait for the other end to go; False when it is still there after the timeout."""
    with connection:
        try:
            return connection.recv(1) == b""
        except ConnectionResetError:
            return True
        except TimeoutError:
            return False


def test_ready_processes_are_told_and_none_is_left(tmp_path: Path) -> None:
    told: list[str] = []
    with Fleet([server("a"), server("b")], tmp_path) as fleet:
        fleet.wait_ready(lambda process: told.append(process.spec.name))
        assert sorted(told) == ["a", "b"]
        assert len({process.port for process in fleet.processes}) == 2
        pids = [process.pid for process in fleet.processes]
        assert all(os.getpgid(pid) == pid for pid in pids)
        assert fleet.supervise() == []
    assert not any(alive(pid) for pid in pids)


def test_early_exit_is_one_line_and_the_others_go_too(tmp_path: Path) -> None:
    broken = exits("broken", "print('loading'); print('no such model: x'); raise SystemExit(3)")
    fleet = Fleet([server("a"), broken], tmp_path)
    with pytest.raises(WorkerExited) as caught:
        started(fleet)
    log = tmp_path / "broken.log"
    assert str(caught.value) == (
        f"worker broken ended with exit code 3 before it was ready: loading | no such model: x; "
        f"its log is {log}"
    )
    assert log.read_text() == "loading\nno such model: x\n"
    assert not any(alive(process.pid) for process in fleet.processes)


def test_death_by_signal_is_told_as_such(tmp_path: Path) -> None:
    spec = exits("killed", "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(WorkerExited, match=r"was ended by signal 9 .* it said nothing"):
        started(Fleet([spec], tmp_path))


def test_one_that_never_gets_healthy_is_named(tmp_path: Path) -> None:
    spec = server("slow", before="print('still loading', flush=True)", status=503)
    spec = replace(spec, start_timeout_s=1)
    with pytest.raises(NotReady) as caught:
        started(Fleet([server("quick"), spec], tmp_path))
    assert str(caught.value) == (
        "worker slow did not answer /health within 1 s, last said: still loading; read its log "
        f"{tmp_path / 'slow.log'}, or allow more with start_timeout_s on its entry or --ready-s"
    )


def test_a_command_that_does_not_exist_is_named(tmp_path: Path) -> None:
    specs = [server("a"), LaunchSpec("ghost", ("/nonexistent/engine", "{port}"))]
    fleet = Fleet(specs, tmp_path)
    with pytest.raises(CannotStart, match=r"worker ghost cannot be started: .*No such file"):
        fleet.__enter__()
    assert not alive(fleet.processes[0].pid)


def test_a_lost_port_is_tried_again_on_another(tmp_path: Path) -> None:
    seen = tmp_path / "ports"
    before = (
        f"path = {str(seen)!r}; open(path, 'a').write(sys.argv[1] + ' ')\n"
        "if len(open(path).read().split()) < 3:\n"
        "    sys.exit('[Errno 98] Address already in use')\n"
    )
    with Fleet([server("racer", before)], tmp_path) as fleet:
        fleet.wait_ready()
        tried = seen.read_text().split()
        assert len(tried) == 3
        assert fleet.processes[0].port == int(tried[-1])


def test_a_port_lost_every_time_is_an_error(tmp_path: Path) -> None:
    spec = exits("unlucky", "raise SystemExit('[Errno 98] Address already in use')")
    with pytest.raises(WorkerExited, match=r"worker unlucky .* Address already in use"):
        started(Fleet([spec], tmp_path))


def test_one_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    stubborn = server("stubborn", "signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    with Fleet([stubborn], tmp_path, grace_s=0.2) as fleet:
        fleet.wait_ready()
        process = fleet.processes[0]
    assert process.exit_code() == -signal.SIGKILL


def test_sigterm_comes_first(tmp_path: Path) -> None:
    polite = server(
        "polite",
        "signal.signal(signal.SIGTERM, lambda *_: (print('drained', flush=True), sys.exit(0)))",
    )
    with Fleet([polite], tmp_path, grace_s=20) as fleet:
        fleet.wait_ready()
        process = fleet.processes[0]
    assert process.exit_code() == 0
    assert process.last_line() == "drained"


@pytest.mark.parametrize(
    "wrap", [lambda c: ("/bin/sh", "-c", c), lambda c: guarded(c, os.getpid())]
)
def test_what_a_shell_command_started_goes_too(
    tmp_path: Path, wrap: Callable[[str], tuple[str, ...]]
) -> None:
    script = tmp_path / "server.py"
    script.write_text(SERVER.format(before="", status=200))
    command = f"true; {sys.executable} {script} {{port}} & wait"
    with Fleet([LaunchSpec("shell", wrap(command))], tmp_path) as fleet:
        fleet.wait_ready()
        connection = connect(fleet.processes[0])
    assert closed(connection)


def test_a_guard_reports_how_its_command_ended(tmp_path: Path) -> None:
    spec = LaunchSpec("guarded", guarded("echo no licence; exit 7", os.getpid()))
    with pytest.raises(WorkerExited, match="exit code 7 before it was ready: no licence"):
        started(Fleet([spec], tmp_path))


def quick() -> Backoff:
    return Backoff(random.Random(0), first_s=0.02, most_s=0.02)


def lines_until(fleet: Fleet, said: str) -> list[str]:
    """What the fleet tells, until a line says this."""
    lines: list[str] = []
    never = threading.Event()
    deadline_s = time.monotonic() + 20
    while not any(said in line for line in lines):
        assert time.monotonic() < deadline_s, lines
        lines += fleet.supervise()
        never.wait(0.01)
    return lines


def test_one_that_dies_is_started_again_under_its_name_and_port(tmp_path: Path) -> None:
    log = tmp_path / "b.log"
    spec = server("b", before="print('up', flush=True)")
    with Fleet([server("a"), spec], tmp_path, backoff=quick) as fleet:
        fleet.wait_ready()
        first = fleet.processes[1]
        connection = connect(first)
        os.kill(first.pid, signal.SIGKILL)
        assert closed(connection)
        died, back = lines_until(fleet, "ready again")
        assert died == (
            "worker b was ended by signal 9: up; it is started again in 0.0 s (failure 1); "
            f"its log is {log}"
        )
        second = fleet.processes[1]
        assert back == f"worker b is ready again (pid {second.pid})"
        assert (second.spec.name, second.port) == ("b", first.port)
        assert second.pid != first.pid
        assert second.ready()
        assert log.read_text() == "up\nup\n"
        assert fleet.supervise() == []
        pids = [process.pid for process in fleet.processes]
    assert not any(alive(pid) for pid in pids)


def test_one_that_keeps_dying_waits_longer_each_time(tmp_path: Path) -> None:
    mark = tmp_path / "started-once"
    before = (
        "import pathlib\n"
        f"mark = pathlib.Path({str(mark)!r})\n"
        "mark.exists() and sys.exit('out of memory')\n"
        "mark.touch()\n"
    )
    with Fleet(
        [server("a", before)], tmp_path, backoff=lambda: Backoff(random.Random(0), first_s=0.02)
    ) as fleet:
        fleet.wait_ready()
        os.kill(fleet.processes[0].pid, signal.SIGKILL)
        lines = lines_until(fleet, "failure 4")
    assert len(lines) == 4
    assert all("exit code 1: out of memory; it is started again in" in each for each in lines[1:])


def test_nothing_is_started_again_once_it_stops(tmp_path: Path) -> None:
    with Fleet([server("a")], tmp_path, backoff=quick) as fleet:
        fleet.wait_ready()
    assert fleet.supervise() == []
    assert fleet.processes[0].exit_code() is not None


def test_one_without_a_health_route_is_asked_for_its_models(tmp_path: Path) -> None:
    script = SERVER.format(before="", status=200).replace('"/health"', '"/v1/models"')
    spec = LaunchSpec("ollama", (sys.executable, "-c", script, "{port}"), start_timeout_s=30)
    with Fleet([spec], tmp_path) as fleet:
        fleet.wait_ready()
        assert fleet.processes[0].ready()


def test_what_left_the_process_group_goes_too(tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    script.write_text(
        SERVER.format(before="signal.signal(signal.SIGTERM, lambda *_: None)", status=200)
    )
    command = f"(setsid {sys.executable} {script} {{port}} &) ; exec tail -f /dev/null"
    fleet = Fleet([LaunchSpec("stray", guarded(command, os.getpid()))], tmp_path, grace_s=0.2)
    with fleet:
        fleet.wait_ready()
        connection = connect(fleet.processes[0])
    assert closed(connection)


def test_environment_and_port_reach_the_process(tmp_path: Path) -> None:
    spec = LaunchSpec(
        "told",
        (
            sys.executable,
            "-c",
            "import os, sys; sys.exit(os.environ['THREADS'] + sys.argv[1])",
            "p={port}",
        ),
        environment={"THREADS": "3 "},
    )
    fleet = Fleet([spec], tmp_path)
    with pytest.raises(WorkerExited) as caught:
        started(fleet)
    assert f": 3 p={fleet.processes[0].port}; " in str(caught.value)


def test_ports() -> None:
    ports = free_ports(["127.0.0.1"] * 20)
    assert len(set(ports)) == 20
    with socket.create_server(("127.0.0.1", ports[0])):
        with pytest.raises(PortTaken) as caught:
            require_free("127.0.0.1", ports[0])
    assert f"port {ports[0]} on 127.0.0.1 cannot be used (Address already in use)" in str(
        caught.value
    )
    require_free("127.0.0.1", ports[0])
    with pytest.raises(PortTaken, match="name an address of this machine with --host"):
        require_free("192.0.2.1", ports[0])
    with pytest.raises(PortTaken, match=r"on no-such-host\.invalid cannot .* with --host"):
        require_free("no-such-host.invalid", 80)
