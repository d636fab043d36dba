"""Workers and router together on this machine, started and ended as one."""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from router.cli.console import counted, stderr_console
from router.cli.engine_names import with_engine_names
from router.cli.errors import CommandFailed
from router.cli.serving import interrupt_on_signals, require_port, serve_router

if TYPE_CHECKING:
    from router.cli.local_workers import LocalPlan
    from router.settings import RouterSettings
    from workers.launch import Fleet, LocalProcess

_ROUTER_READY_S = 60.0
_ELSEWHERE_S = 5.0
_POLL_S = 0.1
_LOG_FOLDERS_KEPT = 20


@dataclass(frozen=True, slots=True)
class Stack:
    """A router that is ready and its local workers; `ending` is set once it shuts down."""

    settings: RouterSettings
    fleet: Fleet
    ending: threading.Event

    @property
    def url(self) -> str:
        """Where clients reach it."""
        return self.settings.listen.url

    def supervise(self) -> None:
        """Start local workers again that have ended, and tell of it on stderr."""
        for line in self.fleet.supervise():
            stderr_console().print(line, markup=False)


Work = Callable[[Stack], None]


def run_stack(plan: LocalPlan, work: Work) -> int:
    """Start everything, run `work` in a thread once it is ready, and end with it or a signal.

    The router serves in this process. Nothing is left behind, however this ends. Returns the
    router's exit status. Raises CommandFailed, SettingsError, and what `work` raises.
    """
    from workers.launch import Fleet
    from workers.launch.errors import LaunchError

    plan.settings.require_keys(os.environ)
    require_port(plan.settings)
    interrupt_on_signals()
    try:
        with Fleet(plan.launches, log_folder()) as fleet:
            _wait_workers(fleet)
            settings = plan.with_addresses([process.url for process in fleet.processes])
            started = [process.spec.name for process in fleet.processes]
            settings = with_engine_names(settings, started, os.environ, stderr_console().print)
            return _serve_beside(Stack(settings, fleet, threading.Event()), work)
    except LaunchError as error:
        raise CommandFailed(str(error)) from error


def _wait_workers(fleet: Fleet) -> None:
    if not fleet.processes:
        return
    console = stderr_console()
    label = f"starting {counted(len(fleet.processes), 'worker')}"
    status = console.status(label) if console.is_terminal else contextlib.nullcontext()

    def say(process: LocalProcess) -> None:
        console.print(f"{process.spec.name} is ready (pid {process.pid}, {process.url})")

    if not console.is_terminal:
        console.print(label)
    with status:
        fleet.wait_ready(say)


def _serve_beside(stack: Stack, work: Work) -> int:
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    failures: list[Exception] = []

    def run() -> None:
        try:
            if _wait_router(stack):
                work(stack)
        except Exception as error:  # task boundary: raised again by the main thread
            failures.append(error)
        finally:
            if not stack.ending.is_set():
                signal.pthread_kill(main_thread, signal.SIGTERM)

    thread = threading.Thread(target=run, name="beside-router", daemon=True)
    thread.start()
    try:
        status = serve_router(stack.settings)
    finally:
        stack.ending.set()
        thread.join()
    if failures:
        raise failures[0]
    return status


def _wait_router(stack: Stack) -> bool:
    """Wait until the router is ready; False when everything ends before.

    Workers that run elsewhere may come later: the router serves without them.
    """
    elsewhere = len(stack.settings.worker_specs) > len(stack.fleet.processes)
    deadline_s = time.monotonic() + (_ELSEWHERE_S if elsewhere else _ROUTER_READY_S)
    answer = "no answer"
    while not stack.ending.wait(_POLL_S):
        stack.supervise()
        connection = http.client.HTTPConnection(*_address(stack.settings), timeout=_ROUTER_READY_S)
        with (
            contextlib.suppress(OSError, http.client.HTTPException),
            contextlib.closing(connection),
        ):
            connection.request("GET", "/ready")
            response = connection.getresponse()
            answer = response.read().decode(errors="replace")
            if response.status == 200:
                return True
        if time.monotonic() > deadline_s:
            if elsewhere:
                stderr_console().print(f"not every worker answers yet: {answer}", markup=False)
                return True
            raise CommandFailed(
                f"the router did not get ready within {_ROUTER_READY_S:g} s: {answer}; "
                "read the workers' logs"
            )
    return False


def _address(settings: RouterSettings) -> tuple[str, int]:
    from urllib.parse import urlsplit

    parts = urlsplit(settings.listen.url)
    assert parts.hostname
    assert parts.port
    return parts.hostname, parts.port


def log_folder() -> Path:
    """Make a folder for the logs of one run, under $SPLITSERVE_HOME or the user's state folder."""
    home = os.environ.get("SPLITSERVE_HOME")
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    logs = (Path(home) if home else Path(state) / "splitserve") / "logs"
    prefix = time.strftime("%Y%m%d-%H%M%S-")
    try:
        logs.mkdir(parents=True, exist_ok=True)
        for old in _of_ended_runs(logs)[:-_LOG_FOLDERS_KEPT]:
            shutil.rmtree(old, ignore_errors=True)
        return Path(tempfile.mkdtemp(f"-{os.getpid()}", prefix, logs))
    except OSError:
        return Path(tempfile.mkdtemp(prefix="splitserve-logs-"))


def _of_ended_runs(logs: Path) -> list[Path]:
    """Return the folders of runs whose process is gone, oldest first."""
    return sorted(
        path for path in logs.iterdir() if path.is_dir() and not _runs(path.name.rpartition("-")[2])
    )


def _runs(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except PermissionError:
        return True
    except (ValueError, OverflowError, ProcessLookupError):
        return False
    return True
