"""Runs a shell command that must not outlive the process that asked for it.

`python -m workers.launch.guard PARENT_PID COMMAND`: foreign engines do not watch their parent, so
this does it for them. It leads the process group in which the command and its children run, and
finds those that have left it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import FrameType

from workers.launch.command import SHELL
from workers.launch.descendants import adopt_orphans, signal_strays
from workers.parent import leave_with


def main(arguments: list[str]) -> int:
    """Run the command and return its exit status, 128 + N when signal N ended it."""
    parent_pid, command = arguments
    # The whole group gets a signal; this process stays to report how the command ended. A handler,
    # not SIG_IGN: what is ignored stays ignored in the command.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _stay)
    adopt_orphans()
    child = subprocess.Popen([SHELL, "-c", command], stdin=subprocess.DEVNULL)
    watch = leave_with(int(parent_pid), _end_all)
    code = _wait_for(child)
    if os.getppid() != int(parent_pid):
        watch.join()  # what the command started may need the second signal
    signal_strays(os.getpid(), signal.SIGKILL)
    return 128 - code if code < 0 else code


def guarded(command: str, parent_pid: int) -> tuple[str, ...]:
    """Return the arguments that start `command` under a guard."""
    return (sys.executable, "-P", "-m", "workers.launch.guard", str(parent_pid), command)


def _wait_for(child: subprocess.Popen[bytes]) -> int:
    """Wait for the command, and on the way for every orphan that came to us."""
    pid = 0
    while pid != child.pid:
        pid, status = os.wait()
    child.returncode = os.waitstatus_to_exitcode(status)
    return child.returncode


def _end_all(number: signal.Signals) -> None:
    signal_strays(os.getpid(), number)
    os.killpg(os.getpgrp(), number)


def _stay(number: int, frame: FrameType | None) -> None:
    pass


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
