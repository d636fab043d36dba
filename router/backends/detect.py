"""Which engine answers at an address: each dialect in turn, the most particular first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from router.backends.base import Backend, Target, Unusable
from router.backends.renaming import RenamingBackend
from router.upstream import Upstream
from router.wire import Deadlines
from splitserve.messages import WorkerSnapshot


class Dialect(Protocol):
    """Makes the backend of one engine."""

    engine: str

    def __call__(self, target: Target, upstream: Upstream, deadlines: Deadlines) -> Backend: ...


class UnknownEngine(ValueError):
    """What answers is no engine that is known. `last_reason` is that of the least particular."""

    def __init__(self, reasons: list[tuple[str, str]]) -> None:
        found = "; ".join(f"{engine}: {reason}" for engine, reason in reasons)
        super().__init__(f"no known engine answers there; {found}")
        self.last_reason = reasons[-1][1] if reasons else "no dialect of that name"


async def detect(
    dialects: Iterable[Dialect], target: Target, upstream: Upstream, deadlines: Deadlines
) -> tuple[Backend, WorkerSnapshot]:
    """Try each dialect; the first that fits is the engine. `options.engine` allows only one.

    Raises UpstreamError when nothing answers, UnknownEngine, and Unusable.
    """
    reasons: list[tuple[str, str]] = []
    options = target.options
    for dialect in dialects:
        if options.engine not in ("", dialect.engine):
            continue
        backend: Backend = dialect(target, upstream, deadlines)
        if options.engine_model:
            backend = RenamingBackend(backend, options.model, options.engine_model)
        try:
            return backend, await backend.probe()
        except Unusable:
            raise
        except ValueError as error:
            reasons.append((dialect.engine, str(error)))
    raise UnknownEngine(reasons)
