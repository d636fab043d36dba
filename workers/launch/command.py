"""What can be said of a shell command before it is started."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess

SHELL = "/bin/sh"
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)
_UNKNOWABLE = frozenset("$`~*?[](){}<>|&;!#\\\n")  # the shell makes something else of it
_LOOK_S = 10.0


def filled(command: str, host: str, port: int) -> str:
    """Put the address into `{host}` and `{port}`; other braces are the command's own."""
    return command.replace("{port}", str(port)).replace("{host}", host)


def why_not_start(command: str) -> str:
    """Return "" when a worker can be started with this command, else cause and mend.

    Nothing of the command runs. Only its first program is looked for, and only where the shell
    would not make that name first; what comes after shows when it is started.
    """
    command = filled(command, "127.0.0.1", 1)
    broken = _shell("-n", "-c", command)
    if broken.returncode != 0:
        said = (broken.stderr.strip().splitlines() or ["syntax error"])[0]
        return f"the shell cannot read it ({said}); mend its quoting"
    if re.search(r"(?<!&)&\s*$", command):
        return "it goes into the background, where nobody can watch it; take the & at its end off"
    program = _first_program(command)
    if program == "setsid":
        return "setsid takes it out of the launcher's reach; leave setsid out"
    if program and not _is_there(program):
        return f"command {program!r} is not found; install it, or write its full path"
    return ""


def _is_there(program: str) -> bool:
    if "/" in program:
        return shutil.which(program) is not None
    return _shell("-c", 'command -v "$1"', "sh", program).returncode == 0  # built-ins too


def _first_program(command: str) -> str:
    """The first word that is no assignment; "" where only the shell could tell."""
    reader = shlex.shlex(command, posix=True, punctuation_chars=True)
    reader.whitespace_split, reader.commenters = True, ""
    for word in reader:
        if word == "exec" or _ASSIGNMENT.fullmatch(word):
            continue
        return "" if _UNKNOWABLE & set(word) else word
    return ""


def _shell(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SHELL, *arguments], capture_output=True, text=True, timeout=_LOOK_S, check=False
    )
