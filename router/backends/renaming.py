"""A worker that knows its model by another name than clients do."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace

from router.backends.base import Backend, BackendCall, PrefillDone
from router.backends.body import with_fields
from router.form_data import boundary_of, find_field, with_value
from router.upstream import UpstreamResponse
from router.usage import TokenCounts
from splitserve.messages import Failure, Handoff, WorkerSnapshot


class RenamingBackend:
    """Any backend, with one model served under the name clients use.

    Requests carry the engine's name to it; answers come back as the engine wrote them.
    """

    def __init__(self, backend: Backend, public: str, engine_model: str) -> None:
        self.worker_id = backend.worker_id
        self._backend = backend
        self._public = public
        self._engine_model = engine_model

    @property
    def why_whole(self) -> str:
        """Why it takes no part in hand-offs, where its dialect says so."""
        said: object = getattr(self._backend, "why_whole", "")
        return said if isinstance(said, str) else ""

    async def probe(self) -> WorkerSnapshot:
        """Probe it. Raises also ValueError when the engine does not have the model."""
        return self._renamed(await self._backend.probe())

    async def load(self, known: WorkerSnapshot) -> WorkerSnapshot:
        """Ask for its load."""
        inner = replace(known, models=(self._engine_model,))
        return self._renamed(await self._backend.load(inner))

    def prefill(self, call: BackendCall) -> AsyncGenerator[Handoff | PrefillDone, None]:
        """Prefill under the engine's name."""
        return self._backend.prefill(self._call(call))

    async def decode(self, call: BackendCall, handoff: Handoff | None) -> UpstreamResponse:
        """Answer under the engine's name."""
        return await self._backend.decode(self._call(call), handoff)

    async def release(self, handoff: Handoff, *, consumed: bool) -> None:
        """End a hand-off."""
        await self._backend.release(handoff, consumed=consumed)

    def recomputed(self, handoff: Handoff, counts: TokenCounts) -> int | None:
        """Say what was computed again."""
        return self._backend.recomputed(handoff, counts)

    def failure_of(self, status: int, body: bytes) -> Failure | None:
        """Say what an error answer means."""
        return self._backend.failure_of(status, body)

    def _renamed(self, snapshot: WorkerSnapshot) -> WorkerSnapshot:
        if self._engine_model not in snapshot.models:
            known = ", ".join(snapshot.models) or "no model"
            raise ValueError(f"it serves {known}, not {self._engine_model}")
        return replace(snapshot, models=(self._public,))

    def _call(self, call: BackendCall) -> BackendCall:
        kind = next((value for name, value in call.headers if name == b"content-type"), b"")
        boundary = boundary_of(kind) if kind.lower().startswith(b"multipart/form-data") else None
        if boundary is None:
            return replace(call, body=with_fields(call.body, {"model": self._engine_model}))
        field = find_field(call.body, boundary, b"model")
        assert field is not None, "the request was taken in by this field"
        return replace(call, body=with_value(call.body, field, self._engine_model.encode()))
