"""Leaving with the process that started us, however it went."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

_POLL_S = 0.2
_GRACE_S = 1.2


def leave_with(
    parent_pid: int, end: Callable[[signal.Signals], None] | None = None
) -> threading.Thread:
    """Watch from a thread; once our parent is another process, `end(SIGTERM)`, then `end(SIGKILL)`.

    `end` sends a signal to what must go: by default to this process. Nothing of us is left two
    seconds after the parent's death, even by SIGKILL, which no handler of the parent sees.
    Returns the thread, which ends with the second signal.
    """
    send = end or _end_this_process

    def watch() -> None:
        never = threading.Event()
        while os.getppid() == parent_pid:
            never.wait(_POLL_S)
        send(signal.SIGTERM)
        never.wait(_GRACE_S)
        send(signal.SIGKILL)

    thread = threading.Thread(target=watch, name="parent-watch", daemon=True)
    thread.start()
    return thread


def _end_this_process(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)
