"""`splitserve up` and `route` as processes, in front of fake workers with real sockets."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from workers.launch.ports import free_ports

MAIN = (sys.executable, "-c", "from router.cli import main; main()")
FAKE = f"{sys.executable} -m router.testing.fake_openai --port {{port}}"
DEADLINE_S = 60


def finished(*arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*MAIN, *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        env={**os.environ, "SPLITSERVE_HOME": str(home)},
    )


@contextmanager
def running(*arguments: str, home: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*MAIN, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "SPLITSERVE_HOME": str(home), "PYTHONUNBUFFERED": "1"},
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=DEADLINE_S)


def read_until(stream: object, start: str) -> list[str]:
    lines: list[str] = []
    for line in stream:  # type: ignore[attr-defined]
        lines.append(line.rstrip("\n"))
        if line.startswith(start):
            return lines
    pytest.fail(f"ended before a line that starts with {start!r}: {lines}")


def port_of(url: str) -> int:
    port = httpx.URL(url).port
    assert port is not None
    return port


@pytest.fixture
def two_fakes(tmp_path: Path) -> Path:
    config = tmp_path / "splitserve.yaml"
    config.write_text(
        "workers:\n"
        f"  - {{start: '{FAKE}', role: aggregated, name: one}}\n"
        f"  - {{start: '{FAKE}', role: aggregated}}\n"
        "report_interval_s: 0.1\n"
    )
    return config


@pytest.mark.parametrize(
    "command", [["up", "--model", "no/such-model"], ["route", "--worker", "x"]]
)
def test_a_port_in_use_is_one_line_before_anything_is_loaded(
    command: list[str], tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = finished(*command, "--port", str(port), home=tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == (
        f"error: port {port} on 127.0.0.1 cannot be used (Address already in use); "
        "stop what listens there or choose another with --port\n"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_serves_and_leaves_nothing_behind(
    two_fakes: Path, tmp_path: Path, number: signal.Signals
) -> None:
    port = free_ports(["127.0.0.1"])[0]
    with running("up", "-c", str(two_fakes), "--port", str(port), home=tmp_path) as process:
        lines = read_until(process.stdout, "ready on ")
        assert lines[-1] == f"ready on http://127.0.0.1:{port}/v1"
        table = [line.split() for line in lines if line.startswith(("one", "aggregated-1"))]
        assert [row[0] for row in table] == ["one", "aggregated-1"]
        body = {"model": "m", "prompt": "hello", "max_tokens": 3}
        url = f"http://127.0.0.1:{port}/v1/completions"
        answer = httpx.post(url, json=body, timeout=DEADLINE_S, trust_env=False)
        assert answer.json()["choices"][0]["text"] == "w0 w1 w2 "
        urls = [cell for row in table for cell in row if cell.startswith("http://")]
        connections = [
            socket.create_connection(("127.0.0.1", port_of(url)), timeout=DEADLINE_S)
            for url in urls
        ]
        process.send_signal(number)
        assert process.wait(DEADLINE_S) == 0
        for connection in connections:
            with connection:
                assert connection.recv(1) == b""


@pytest.mark.parametrize("command", ["up", "route"])
def test_a_worker_that_dies_is_started_again_and_serves(command: str, tmp_path: Path) -> None:
    config = tmp_path / "splitserve.yaml"
    config.write_text(f"workers: [{{start: '{FAKE}', name: one}}]\nreport_interval_s: 0.1\n")
    port = free_ports(["127.0.0.1"])[0]
    url = f"http://127.0.0.1:{port}"
    with running(command, "-c", str(config), "--port", str(port), home=tmp_path) as process:
        lines = read_until(process.stdout, "ready on ")
        *_, address, pid, log = next(line.split() for line in lines if line.startswith("one"))
        os.killpg(int(pid), signal.SIGKILL)
        died = read_until(process.stderr, "worker one ")[-1]
        assert died.startswith(f"worker one was ended by signal 9: {address}; it is started again")
        assert died.endswith(f"its log is {log}")
        back = read_until(process.stderr, "worker one ")[-1]
        assert back.startswith("worker one is ready again (pid ")
        body = {"model": "m", "prompt": "hello", "max_tokens": 1}
        with httpx.Client(timeout=DEADLINE_S, trust_env=False) as client:
            while client.get(f"{url}/ready").status_code != 200:
                pass  # the router asks its workers ten times a second
            answer = client.post(f"{url}/v1/completions", json=body)
            assert answer.status_code == 200
            (worker,) = client.get(f"{url}/admin/workers").json()["workers"]
        assert (worker["id"], worker["url"]) == ("one", address)
        assert Path(log).read_text() == f"{address}\n" * 2
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == 0


def test_a_started_engine_may_have_a_name_of_its_own_for_the_model(tmp_path: Path) -> None:
    config = tmp_path / "splitserve.yaml"
    config.write_text(
        f"models: {{llama: {{workers: [{{start: '{FAKE} --model org/Llama', role: auto}}]}}}}"
    )
    port = free_ports(["127.0.0.1"])[0]
    with running("up", "-c", str(config), "--port", str(port), home=tmp_path) as process:
        read_until(process.stdout, "ready on ")
        assert read_until(process.stderr, "auto-1 serves ")[-1] == (
            "auto-1 serves org/Llama as llama"
        )
        body = {"model": "llama", "prompt": "hello", "max_tokens": 1}
        url = f"http://127.0.0.1:{port}/v1/completions"
        answer = httpx.post(url, json=body, timeout=DEADLINE_S, trust_env=False)
        assert (answer.status_code, answer.json()["model"]) == (200, "org/Llama")
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == 0


@pytest.mark.parametrize("command", ["up", "route"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_no_worker_outlives_the_router(
    command: str, number: signal.Signals, two_fakes: Path, tmp_path: Path
) -> None:
    port = free_ports(["127.0.0.1"])[0]
    with running(command, "-c", str(two_fakes), "--port", str(port), home=tmp_path) as process:
        lines = read_until(process.stdout, "ready on ")
        urls = [cell for line in lines for cell in line.split() if cell.startswith("http://127")]
        connections = [
            socket.create_connection(("127.0.0.1", port_of(url)), timeout=DEADLINE_S)
            for url in urls[:2]
        ]
        process.send_signal(number)
        assert process.wait(DEADLINE_S) == (0 if number is signal.SIGHUP else -signal.SIGKILL)
        for connection in connections:
            with connection:
                assert connection.recv(1) == b""


def test_a_command_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    config = tmp_path / "splitserve.yaml"
    config.write_text("workers: [{start: 'no-such-engine serve --port {port}', name: one}]")
    for command in ("check", "up", "route"):
        done = finished(command, "-c", str(config), home=tmp_path / "home")
        assert done.returncode == 2
        where = f"{config}: " if command == "check" else ""
        assert done.stderr == (
            f"error: {where}worker one: start 'no-such-engine serve --port {{port}}': command "
            "'no-such-engine' is not found; install it, or write its full path\n"
        )
    assert not (tmp_path / "home").exists()


def test_a_worker_that_never_gets_ready_is_one_line(tmp_path: Path) -> None:
    config = tmp_path / "splitserve.yaml"
    silent = "echo loading {port}; exec tail -f /dev/null"
    config.write_text(f"workers: [{{start: '{silent}', name: slow, start_timeout_s: 0.5}}]")
    port = free_ports(["127.0.0.1"])[0]
    done = finished("route", "-c", str(config), "--port", str(port), home=tmp_path / "home")
    assert done.returncode == 1
    line = done.stderr.splitlines()[-1]
    assert line.startswith(
        "error: worker slow did not answer /health within 0.5 s, last said: loading "
    )
    assert line.endswith("or allow more with start_timeout_s on its entry or --ready-s")


def test_a_worker_that_cannot_start_is_one_line(tmp_path: Path) -> None:
    config = tmp_path / "splitserve.yaml"
    config.write_text(
        f"workers: [{{start: '{FAKE}'}}, {{start: 'echo no GPU {{port}}; exit 4', name: bad}}]"
    )
    port = free_ports(["127.0.0.1"])[0]
    done = finished("up", "-c", str(config), "--port", str(port), home=tmp_path / "home")
    assert done.returncode == 1
    assert done.stdout == ""
    said, *_, line = done.stderr.splitlines()  # between them the other may have got ready
    assert said == "starting 2 workers"
    assert line.startswith("error: worker bad ended with exit code 4 before it was ready: no GPU ")
    assert line.endswith("bad.log")


def test_an_interrupt_while_workers_start_leaves_nothing(tmp_path: Path) -> None:
    config = tmp_path / "splitserve.yaml"
    silent = "echo $$ {port}; exec tail -f /dev/null"  # runs and never listens
    config.write_text(f"workers: [{{start: '{silent}', name: silent}}]")
    port = free_ports(["127.0.0.1"])[0]
    home = tmp_path / "home"
    with running("up", "-c", str(config), "--port", str(port), home=home) as process:
        read_until(process.stderr, "starting 1 worker")
        process.send_signal(signal.SIGINT)
        assert process.wait(DEADLINE_S) == 1
        assert process.stderr is not None
        assert process.stderr.read().startswith("error: interrupted before it was done; nothing")
    (log,) = home.rglob("silent.log")
    if written := log.read_text().split():  # the interrupt may have come before the shell ran
        with pytest.raises(ProcessLookupError):
            os.kill(int(written[0]), 0)


def test_an_unset_key_stops_up_before_it_starts_anything(two_fakes: Path, tmp_path: Path) -> None:
    with two_fakes.open("a") as config:
        config.write("admin: {key_env: SPLITSERVE_TEST_UNSET_KEY}\n")
    done = finished("up", "-c", str(two_fakes), home=tmp_path / "home")
    assert done.returncode == 2
    assert done.stderr.startswith("error: admin.key_env: environment variable SPLITSERVE_TEST_UN")
    assert not (tmp_path / "home").exists()


def test_route_serves_backends_that_run(tmp_path: Path) -> None:
    port, backend = free_ports(["127.0.0.1"] * 2)
    fake = [sys.executable, "-m", "router.testing.fake_openai", "--port", str(backend)]
    with subprocess.Popen(fake, stdout=subprocess.PIPE, text=True) as worker:
        try:
            assert worker.stdout is not None
            url = worker.stdout.readline().strip()
            arguments = ("route", "--worker", url, "--port", str(port))
            with running(*arguments, home=tmp_path) as process:
                read_until(
                    process.stderr, f"router on http://127.0.0.1:{port} in front of 1 worker"
                )
                transport = httpx.HTTPTransport(retries=10)
                with httpx.Client(transport=transport, timeout=DEADLINE_S) as client:
                    health = client.get(f"http://127.0.0.1:{port}/health")
                assert health.status_code == 200
                process.send_signal(signal.SIGTERM)
                assert process.wait(DEADLINE_S) == 0
        finally:
            worker.kill()
