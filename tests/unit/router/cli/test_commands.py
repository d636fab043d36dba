"""What the command line says without a server: help, usage, configuration, exit codes."""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from router.cli.commands import build_app, run

COMMANDS = (
    "simulate",
    "up",
    "route",
    "worker",
    "probe",
    "demo",
    "check",
    "explain",
    "version",
    "models",
    "bench",
)
LATER = ("plan", "top")
GOOD = "models: {m: {workers: [{url: 'http://10.0.0.5:8000', role: prefill}]}}\n"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "splitserve.yaml"
    path.write_text(GOOD)
    return path


def one_line(text: str) -> str:
    assert text.count("\n") == 1, text
    assert text.startswith("error: ")
    return text.removeprefix("error: ")


def test_help_names_every_command_and_no_other() -> None:
    shown = CliRunner().invoke(build_app(), ["--help"])
    assert shown.exit_code == 0
    for name in COMMANDS:
        assert f" {name} " in shown.output
    for name in LATER:
        assert f" {name} " not in shown.output


@pytest.mark.parametrize("command", [*COMMANDS, "models pull", "bench relay", "bench kv-transfer"])
def test_every_command_has_help(command: str) -> None:
    shown = CliRunner().invoke(build_app(), [*command.split(), "--help"])
    assert shown.exit_code == 0
    assert "Usage:" in shown.output


def test_no_arguments_is_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0
    assert "Usage: splitserve" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["version"]) == 0
    version = importlib.metadata.version("splitserve")
    assert capsys.readouterr().out == f"splitserve {version}\n"


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "from router.cli.commands import run\n"
        "assert run(['up', '--help']) == 0\n"
        "heavy = {'fastapi', 'uvicorn', 'httpx', 'aiohttp', 'workers.native'}\n"
        "found = heavy & set(sys.modules)\n"
        "sys.exit(f'imported: {found}' if found else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "arguments,said",
    [
        ("nonsense", "No such command 'nonsense'."),
        ("up --prefil 2", "No such option: --prefil"),
        ("up --prefill two", "--prefill"),
        ("up --port 70000", "--port"),
        ("up --decode 0", "these workers cannot answer a request; ask for --prefill 1"),
        ("explain", "'ID'"),
        ("explain a b", "unexpected extra argument"),
        ("check", "--config"),
        ("check -c none.yaml", "none.yaml: there is no such file"),
        ("route", "route has no backend; give --worker URL"),
        ("probe", "Missing argument 'URL...'"),
        ("probe ftp://x", "ftp://x: url: scheme 'ftp' is not http or https"),
        ("probe a --key-env NO_SUCH_KEY", "environment variable NO_SUCH_KEY is not set"),
        ("route --worker ftp://x", "worker URL 'ftp://x': scheme 'ftp' is not http or https"),
        ("route --prefill http://a --decode http://a", "is there twice"),
        ("worker --role ffn", "--role: 'ffn' cannot be used; not in this version"),
        ("worker --device tpu", "--device: 'tpu' cannot be used; use cpu, cuda or cuda:N"),
    ],
)
def test_wrong_usage_is_one_line_and_2(
    arguments: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments.split()) == 2
    captured = capsys.readouterr()
    assert said in one_line(captured.err)
    assert captured.out == ""


def test_check_accepts(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", "-c", str(config)]) == 0
    assert capsys.readouterr().out == f"{config}: ok, 1 model, 1 worker\n"


def test_check_refuses_with_place_and_mend(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(GOOD + "polcy: least-work\n")
    assert run(["check", "-c", str(config)]) == 2
    captured = capsys.readouterr()
    assert one_line(captured.err) == f"{config}:2: polcy: unknown key; did you mean 'policy'?\n"
    assert captured.out == ""


def test_check_prints_what_it_can_read_back(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["check", "-c", str(config), "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert yaml.safe_load(printed)["policy"] == "slack"
    config.write_text(printed)
    assert run(["check", "-c", str(config), "--print-config"]) == 0
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize(
    "start,said",
    [
        ("no-such-engine m --port {port}", "command 'no-such-engine' is not found; install it"),
        ("sh m --port {port} &", "it goes into the background"),
        ("sh m --port {port} '", "the shell cannot read it"),
        ("setsid sh m --port {port}", "leave setsid out"),
    ],
)
def test_what_cannot_be_started_is_refused(
    config: Path, start: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(yaml.safe_dump({"workers": [{"start": start, "name": "gpu-1"}]}))
    for command in ("check", "route", "up"):
        assert run([command, "-c", str(config)]) == 2
        line = one_line(capsys.readouterr().err).removeprefix(f"{config}: ")
        assert line.startswith(f"worker gpu-1: start {start!r}: ")
        assert said in line


def test_up_refuses_native_options_beside_a_file_with_workers(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["up", "-c", str(config), "--prefill", "2"]) == 2
    assert "--prefill goes with native workers" in one_line(capsys.readouterr().err)


def test_a_group_without_a_command_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench"]) == 2
    captured = capsys.readouterr()
    assert "kv-transfer" in captured.out + captured.err
    assert "error:" not in captured.err
