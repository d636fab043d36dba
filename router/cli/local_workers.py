"""What `up` and `demo` start: native workers for a model, or the workers of a file."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from router.cli.errors import CommandFailed, WrongUsage
from router.cli.models import resolve_model

if TYPE_CHECKING:
    from router.settings import RouterSettings, WorkerSpec
    from workers.launch import LaunchSpec

_LONGEST_SHOWN = 80  # characters of a command


@dataclass(frozen=True, slots=True)
class LocalPlan:
    """The router's settings, in which every local worker is a `start`, and how to start them.

    `launches` are in the order of these workers in `settings.worker_specs`.
    """

    settings: RouterSettings
    launches: tuple[LaunchSpec, ...]

    def with_addresses(self, urls: list[str]) -> RouterSettings:
        """Return settings in which each started worker is known by its address."""
        from router.settings import build

        addresses = iter(zip(self.launches, urls, strict=True))

        def known(worker: WorkerSpec) -> dict[str, object]:
            shown = worker.model_dump(exclude_none=True)
            shown.pop("start_timeout_s", None)
            if shown.pop("start", None) is not None:
                launch, shown["url"] = next(addresses)
                shown["name"] = launch.name
            return shown

        data = self.settings.model_dump(exclude_none=True)
        data["models"] = {
            name: {"workers": [known(worker) for worker in spec.workers]}
            for name, spec in self.settings.models.items()
        }
        data["workers"] = [known(worker) for worker in self.settings.workers]
        return build(data)

    def allowing(self, ready_s: float | None) -> LocalPlan:
        """Return a plan in which every worker may take `ready_s` to start; None changes nothing."""
        if ready_s is None:
            return self
        launches = tuple(replace(each, start_timeout_s=ready_s) for each in self.launches)
        return replace(self, launches=launches)


@dataclass(frozen=True, slots=True)
class NativeWish:
    """Which native workers are wanted. `counts` is by role; `threads` 0 shares the cores."""

    model: str
    counts: Mapping[str, int]
    threads: int = 0
    device: str = "cpu"

    def check(self) -> None:
        """Raise WrongUsage for a set of workers that cannot answer a request."""
        if self.counts["aggregated"] == 0 and not (
            self.counts["prefill"] and self.counts["decode"]
        ):
            raise WrongUsage(
                "these workers cannot answer a request; ask for --prefill 1 and --decode 1, "
                "or for --aggregated 1"
            )

    @property
    def served_name(self) -> str:
        """The name clients ask for."""
        local = Path(self.model).expanduser()
        return (
            local.resolve().stem
            if local.is_file()
            else (local.resolve().name if local.is_dir() else self.model)
        )


def cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def native_plan(settings: RouterSettings, wish: NativeWish) -> LocalPlan:
    """Resolve the model and plan native workers for it. Raises CommandFailed."""
    from router.settings import ModelSpec, WorkerSpec
    from splitserve.messages import Role
    from workers.launch import LaunchSpec
    from workers.settings import WorkerSettings, to_arguments

    if importlib.util.find_spec("torch") is None:
        raise CommandFailed("native workers need torch; pip install 'splitserve[native]'")
    folder = resolve_model(wish.model)
    names = [(role, f"{role}-{i + 1}") for role, count in wish.counts.items() for i in range(count)]
    threads = wish.threads or max(1, cores() // len(names))
    launches = []
    for role, name in names:
        worker = WorkerSettings(
            model=str(folder),
            served_name=wish.served_name,
            role=role,
            device=wish.device,
            threads=threads,
            parent_pid=os.getpid(),
        )
        arguments = [a for a in to_arguments(worker) if not a.startswith("--port")]
        command = (sys.executable, "-P", "-m", "workers", *arguments, "--port={port}")
        environment = {"OMP_NUM_THREADS": str(threads)}
        launches.append(LaunchSpec(name, command, role, environment=environment))
    specs = tuple(
        WorkerSpec(start=" ".join(each.command), role=Role(each.role), name=each.name)
        for each in launches
    )
    models = {wish.served_name: ModelSpec(workers=specs)}
    return LocalPlan(settings.model_copy(update={"models": models}), tuple(launches))


def file_plan(settings: RouterSettings) -> LocalPlan:
    """Plan the workers that a file says how to start. Raises WrongUsage."""
    from workers.launch import LaunchSpec
    from workers.launch.guard import guarded
    from workers.launch.local_process import START_TIMEOUT_S

    require_startable(settings)
    launches = []
    taken = {worker.name for worker in settings.worker_specs}
    for worker in settings.worker_specs:
        if worker.start is not None:
            free = (f"{worker.role}-{number}" for number in range(1, len(taken) + 99))
            name = worker.name or next(each for each in free if each not in taken)
            taken.add(name)
            launch = LaunchSpec(name, guarded(worker.start, os.getpid()), worker.role.value)
            allowed_s = worker.start_timeout_s or START_TIMEOUT_S
            launches.append(replace(launch, start_timeout_s=allowed_s))
    return LocalPlan(settings, tuple(launches))


def require_startable(settings: RouterSettings) -> None:
    """Raise WrongUsage when a worker's command cannot be started on this machine."""
    from workers.launch.command import why_not_start

    for worker in settings.worker_specs:
        why_not = why_not_start(worker.start) if worker.start is not None else ""
        if why_not:
            start = worker.start or ""
            shown = start if len(start) <= _LONGEST_SHOWN else f"{start[:_LONGEST_SHOWN]}..."
            named = f"worker {worker.name}: " if worker.name else ""
            raise WrongUsage(f"{named}start {shown!r}: {why_not}")
