"""What is said of a command before it is started."""

from pathlib import Path

import pytest

from workers.launch.command import filled, why_not_start


def test_only_port_and_host_are_filled_in() -> None:
    command = """serve --host {host} --port {port} --json '{"port": {}, "a": {b}}' --again {port}"""
    assert filled(command, "::1", 81) == (
        """serve --host ::1 --port 81 --json '{"port": {}, "a": {b}}' --again 81"""
    )


@pytest.mark.parametrize(
    "command",
    [
        "sh -c 'exit 0' {port}",
        "exec sh {port}",
        "A=1 B='x y' exec sh {port}",
        "cd /tmp && ./not-looked-for {port}",
        "if true; then no-such-engine {port}; fi",
        "$ENGINE serve {port}",
        "~/engine/serve {port}",
        "(no-such-engine {port})",
        'A="$(no-such-engine)" sh {port}',
        "sh a && sh b {port}",
        "sh \\\n  --port {port}",
        """sh --kv-transfer-config '{"kv_connector": "NixlConnector"}' --port {port}""",
    ],
)
def test_what_can_start_or_only_the_shell_can_tell(command: str) -> None:
    assert why_not_start(command) == ""


@pytest.mark.parametrize(
    "command,said",
    [
        ("no-such-engine --port {port}", "'no-such-engine' is not found; install it"),
        ("HF_HUB_OFFLINE=1 no-such-engine {port}", "'no-such-engine' is not found"),
        ("exec /nonexistent/engine {port}", "'/nonexistent/engine' is not found"),
        ("sh serve {port} &", "take the & at its end off"),
        ("sh serve {port} &  \n", "take the & at its end off"),
        ("setsid sh serve {port}", "leave setsid out"),
        ("sh 'serve {port}", "mend its quoting"),
        ("if true; then sh {port}", "mend its quoting"),
    ],
)
def test_what_cannot_start_has_its_cause_and_mend(command: str, said: str) -> None:
    why_not = why_not_start(command)
    assert said in why_not
    assert "\n" not in why_not


def test_nothing_of_the_command_runs(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    for command in (f"touch {mark}", f"A=$(touch {mark}) sh", f"touch {mark} &", f"`touch {mark}`"):
        why_not_start(command)
    assert not mark.exists()


def test_a_file_that_may_not_be_executed_is_not_found(tmp_path: Path) -> None:
    script = tmp_path / "serve.sh"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o644)
    assert "is not found" in why_not_start(f"{script} {{port}}")
    script.chmod(0o755)
    assert why_not_start(f"{script} {{port}}") == ""
