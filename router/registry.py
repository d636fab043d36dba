"""Which workers there are: probes them, keeps their reports fresh, declares them lost.

A worker joins with its first good probe and is lost after `MISSES` bad polls in a row. What it
needs to come back is another good probe, also under a new process at the same address.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, field, replace
from functools import partial

from router.backends.base import Backend, Target, WorkerOptions, WorkerRestarted
from router.backends.detect import Dialect, detect
from router.backends.llama_cpp import LlamaCppBackend
from router.backends.native import NativeBackend
from router.backends.openai import OpenAIBackend
from router.backends.sglang import SglangBackend
from router.backends.speed_probe import CannotMeasure, Speeds, measure
from router.backends.vllm import VllmBackend
from router.dispatch import Dispatcher
from router.errors import RouterError, UpstreamError
from router.origin import Origin, parse_origin
from router.upstream import Upstream
from router.wire import Deadlines
from splitserve.messages import Role, WorkerLost, WorkerReported, WorkerSnapshot

log = logging.getLogger("splitserve.registry")

MISSES = 3
SPEED_PROBE_S = 30.0  # a worker joins without measured speeds rather than later

_PROBE_FAILED = (RouterError, ValueError)
# Most particular first: every native worker is an OpenAI server too.
DIALECTS: tuple[Dialect, ...] = (
    NativeBackend,
    SglangBackend,
    VllmBackend,
    LlamaCppBackend,
    OpenAIBackend,
)


@dataclass(slots=True)
class Member:
    """One worker as the registry sees it. `trouble` is "" while it answers."""

    worker_id: str
    origin: Origin
    role: Role
    options: WorkerOptions = field(default_factory=WorkerOptions)
    backend: Backend | None = None
    snapshot: WorkerSnapshot | None = None
    models_seen: tuple[str, ...] = ()
    misses: int = 0
    trouble: str = "not probed yet"
    draining: bool = False
    assigned: Role | None = None  # by the planner, where `role` leaves it to choose
    speeds: Speeds | None = None  # measured once, at its first join
    poked: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def alive(self) -> bool:
        """True while the scheduler may use it."""
        return self.snapshot is not None


class Registry:
    """Owns the members and one polling task for each."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        upstream: Upstream,
        *,
        interval_s: float,
        deadlines: Deadlines,
        probe_speeds: bool = False,
    ) -> None:
        self._dispatcher = dispatcher
        self._upstream = upstream
        self._interval_s = interval_s
        self._deadlines = deadlines
        self._probe_speeds = probe_speeds
        self.members: dict[str, Member] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def add(
        self, url: str, role: Role, name: str = "", options: WorkerOptions | None = None
    ) -> Member:
        """Begin to watch a worker. Raises BadWorkerUrl, or ValueError for a name in use."""
        origin = parse_origin(url)
        worker_id = name or self._free_name(role)
        if worker_id in self.members:
            raise ValueError(f"a worker named {worker_id!r} is there already; choose another name")
        member = Member(worker_id, origin, role, options or WorkerOptions())
        self.members[worker_id] = member
        self._tasks[worker_id] = asyncio.create_task(self._watch(member))
        return member

    def _free_name(self, role: Role) -> str:
        names = (f"{role.value}-{number}" for number in range(len(self.members) + 1))
        return next(name for name in names if name not in self.members)

    def remove(self, worker_id: str) -> None:
        """Forget a worker; requests on it are moved or fail."""
        self._tasks.pop(worker_id).cancel()
        member = self.members.pop(worker_id)
        self._lose(member, "removed")
        if all(other.origin != member.origin for other in self.members.values()):
            self._upstream.forget(member.origin)

    def update(
        self, worker_id: str, *, role: Role | None = None, draining: bool | None = None
    ) -> None:
        """Change what a worker is used for; requests on it go on."""
        member = self.members[worker_id]
        if role is not None:
            member.role, member.assigned = role, None
        member.draining = member.draining if draining is None else draining
        if member.snapshot is not None:
            known = member.snapshot
            declared = known if role is None else replace(known, role=role, soft_role=False)
            self._report(member, declared)

    def assign(self, worker_id: str, role: Role) -> None:
        """Give an `auto` worker its role for now; AUTO lets it do both."""
        member = self.members.get(worker_id)
        if member is None or member.snapshot is None:
            return
        if member.assigned is None and member.snapshot.role is not Role.AUTO:
            return  # its role was declared
        member.assigned = role
        self._report(member, member.snapshot)

    def poke(self, worker_id: str) -> None:
        """Something went wrong with this worker: ask it now rather than at the next turn."""
        member = self.members.get(worker_id)
        if member is not None:
            member.poked.set()

    async def stop(self) -> None:
        """Stop watching."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def unready_models(self, wanted: tuple[str, ...]) -> list[str]:
        """Return the models among `wanted` (those of all members, if none) nobody can serve."""
        seen = {model for member in self.members.values() for model in member.models_seen}
        return [model for model in wanted or sorted(seen) if not self._usable(model)]

    def _usable(self, model: str) -> bool:
        """True when some worker takes it whole, or some pair splits it."""
        ledger = self._dispatcher.scheduler.ledger
        serving = ledger.serving(model)
        working = [a.snapshot for a in serving if not a.snapshot.draining]
        return any(not worker.splits_only for worker in working) or ledger.pairs.any(working)

    def models(self) -> list[str]:
        """Return the names of models that live workers serve."""
        accounts = self._dispatcher.scheduler.ledger.workers.values()
        return sorted({model for a in accounts for model in a.snapshot.models})

    # --- one worker's task ----------------------------------------------------------------------

    async def _watch(self, member: Member) -> None:
        while True:
            await self._poll(member)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await member.poked.wait()
            member.poked.clear()

    async def _poll(self, member: Member) -> None:
        try:
            if member.snapshot is None or member.backend is None:
                await self._join(member)
            else:
                fresh = await member.backend.load(member.snapshot)
                # The role may have been changed while the worker answered.
                self._report(member, replace(fresh, role=member.snapshot.role))
        except WorkerRestarted as error:
            self._lose(member, str(error))
            member.trouble = str(error)
            member.poked.set()  # what is there now can join at once
        except _PROBE_FAILED as error:
            self._missed(member, str(error))
        except Exception as error:  # task boundary: one odd worker must not end its watch
            log.exception("polling %s", member.worker_id)
            self._missed(member, f"{type(error).__name__}: {error}")

    async def _join(self, member: Member) -> None:
        backend, snapshot = await self._detect(member)
        if self._probe_speeds:
            snapshot = await self._with_speeds(member, backend, snapshot)
        self._report(member, snapshot)
        member.backend = backend
        self._dispatcher.backends[member.worker_id] = backend
        log.info(
            "%s joined: %s at %s serves %s",
            member.worker_id, snapshot.engine, member.origin.url, ", ".join(snapshot.models),
        )  # fmt: skip

    async def _with_speeds(
        self, member: Member, backend: Backend, snapshot: WorkerSnapshot
    ) -> WorkerSnapshot:
        """Measure a worker that does not tell how fast it is; it joins in any case."""
        wanted = member.options.model
        models = tuple(m for m in snapshot.models if wanted in ("", m))
        if snapshot.prefill_tok_s or snapshot.splits_only or not models:
            return snapshot
        if len(models) > 1:
            note = "its speed is not measured, as it has several models; name one to have it done"
            return replace(snapshot, notes=(*snapshot.notes, note))
        try:
            async with asyncio.timeout(SPEED_PROBE_S):
                speeds = member.speeds = member.speeds or await measure(backend, models[0])
        except (UpstreamError, CannotMeasure, TimeoutError) as error:
            note = f"its speed could not be measured: {str(error) or 'it took too long'}"
            return replace(snapshot, notes=(*snapshot.notes, note))
        return replace(
            snapshot, prefill_tok_s=speeds.prefill_tok_s, decode_tok_s=speeds.decode_tok_s
        )

    async def _detect(self, member: Member) -> tuple[Backend, WorkerSnapshot]:
        told = partial(self._dispatcher.recomputed, member.worker_id)
        target = Target(member.worker_id, member.origin, member.role, member.options, told)
        return await detect(DIALECTS, target, self._upstream, self._deadlines)

    def _report(self, member: Member, snapshot: WorkerSnapshot) -> None:
        wanted = member.options.model
        models = tuple(m for m in snapshot.models if not wanted or m == wanted)
        if not models:
            known = ", ".join(snapshot.models) or "no model"
            raise ValueError(f"it serves {known}, not {wanted or 'any'}")
        if member.assigned is not None:
            snapshot = replace(snapshot, role=member.assigned, soft_role=True)
        if member.options.max_running:
            snapshot = replace(snapshot, max_running=member.options.max_running)
        member.snapshot = replace(snapshot, models=models, draining=member.draining)
        member.misses, member.trouble, member.models_seen = 0, "", models
        self._dispatcher.tell(WorkerReported(member.snapshot))

    def _missed(self, member: Member, reason: str) -> None:
        member.misses += 1
        if member.trouble != reason:
            log.warning("%s at %s: %s", member.worker_id, member.origin.url, reason)
        member.trouble = reason
        if member.alive and member.misses >= MISSES:
            self._lose(member, reason)

    def _lose(self, member: Member, reason: str) -> None:
        member.snapshot = member.assigned = None
        if member.backend is not None:
            self._dispatcher.tell(WorkerLost(member.worker_id, reason))
            self._dispatcher.backends.pop(member.worker_id, None)
            member.backend = None
