"""Routes that tell: health, readiness, metrics, models, workers, decisions."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, FastAPI, Query, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict

from router.api.auth import Keyring
from router.api.errors import ApiError
from router.api.pairs import pairing_fields, pairs_of
from router.backends.base import WorkerOptions
from router.dispatch import Dispatcher
from router.errors import BadWorkerUrl
from router.registry import Member, Registry
from router.sections import Name
from splitserve.messages import PairJudged, Role, WorkerSnapshot


class NewWorker(BaseModel):
    """Body of `POST /admin/workers`."""

    model_config = ConfigDict(extra="forbid")
    url: str
    role: Role = Role.AUTO
    name: Name | Literal[""] = ""
    model: str = ""


class WorkerChange(BaseModel):
    """Body of `PATCH /admin/workers/{id}`."""

    model_config = ConfigDict(extra="forbid")
    role: Role | None = None
    drain: bool | None = None


class StateRoutes:
    """Adds the routes to an application."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        registry: Registry,
        keyring: Keyring,
        wanted_models: tuple[str, ...],
    ) -> None:
        self._dispatcher = dispatcher
        self._registry = registry
        self._keyring = keyring
        self._wanted_models = wanted_models

    def add_to(self, app: FastAPI) -> None:
        """Register every route."""
        app.get("/health")(self.health)
        app.get("/ready")(self.ready)
        app.get("/metrics")(self.metrics)
        app.get("/v1/models")(self.models)
        app.get("/v1/models/{name:path}")(self.model)
        admin = APIRouter(prefix="/admin", dependencies=[Depends(self.admin_only)])
        admin.get("/workers")(self.workers)
        admin.post("/workers", status_code=201)(self.add_worker)
        admin.patch("/workers/{worker_id}")(self.change_worker)
        admin.delete("/workers/{worker_id}")(self.remove_worker)
        admin.delete("/quarantines/{prefill}/{decode}")(self.lift_quarantine)
        admin.get("/requests/{request_id}")(self.request)
        admin.get("/decisions")(self.decisions)
        app.include_router(admin)

    async def admin_only(self, request: Request) -> None:
        """Raise ApiError unless the request may use /admin."""
        self._keyring.require_admin(dict(request.headers.raw))

    async def health(self) -> dict[str, str]:
        """Say that the process is alive."""
        return {"status": "ok"}

    async def ready(self) -> Response:
        """Say whether every model can be served, and if not, what is missing."""
        unready = self._registry.unready_models(self._wanted_models)
        troubles = {m.worker_id: m.trouble for m in self._registry.members.values() if m.trouble}
        any_alive = any(member.alive for member in self._registry.members.values())
        if any_alive and not unready:
            return JSONResponse({"status": "ready", "workers_in_trouble": troubles})
        body = {"status": "not ready", "models_without_worker": unready, "workers": troubles}
        return JSONResponse(body, 503)

    async def metrics(self) -> Response:
        """Prometheus text."""
        text = self._dispatcher.metrics.render(self._dispatcher.scheduler)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def models(self, request: Request) -> dict[str, Any]:
        """List what live workers serve."""
        self._keyring.tenant(dict(request.headers.raw))
        return {"object": "list", "data": [_card(name) for name in self._registry.models()]}

    async def model(self, name: str, request: Request) -> dict[str, Any]:
        """Show one model."""
        self._keyring.tenant(dict(request.headers.raw))
        if name not in self._registry.models():
            message = f"the model '{name[:200]}' does not exist; GET /v1/models lists the models"
            raise ApiError(404, message, code="model_not_found", param="model")
        return _card(name)

    async def workers(self) -> dict[str, Any]:
        """List workers with state, load and trouble."""
        return {"workers": [self._show(member) for member in self._registry.members.values()]}

    async def add_worker(self, wish: NewWorker) -> dict[str, Any]:
        """Begin to watch a worker; it is used once it answers."""
        try:
            member = self._registry.add(
                wish.url, wish.role, wish.name, WorkerOptions(model=wish.model)
            )
        except (BadWorkerUrl, ValueError) as error:
            raise ApiError(400, str(error), code="bad_worker", param="url") from error
        return self._show(member)

    async def change_worker(self, worker_id: str, wish: WorkerChange) -> dict[str, Any]:
        """Change a worker's role, or drain it."""
        member = self._member(worker_id)
        self._registry.update(worker_id, role=wish.role, draining=wish.drain)
        return self._show(member)

    async def remove_worker(self, worker_id: str) -> dict[str, bool]:
        """Forget a worker."""
        self._member(worker_id)
        self._registry.remove(worker_id)
        return {"removed": True}

    async def lift_quarantine(self, prefill: str, decode: str) -> dict[str, bool]:
        """Let a pair hand over again before its time."""
        known = (prefill, decode) in self._dispatcher.scheduler.ledger.pairs.quarantined
        if not known:
            message = f"{prefill[:80]} -> {decode[:80]} is not quarantined; see GET /admin/workers"
            raise ApiError(404, message, code="quarantine_not_found")
        self._dispatcher.tell(PairJudged(prefill, decode, reason=""))
        return {"lifted": True}

    async def request(self, request_id: str) -> dict[str, Any]:
        """Show one decision record."""
        record = self._dispatcher.records.find(request_id)
        if record is None:
            message = f"no request {request_id[:80]!r}; only the latest are kept"
            raise ApiError(404, message, code="request_not_found")
        return record.to_json()

    async def decisions(self, limit: Annotated[int, Query(ge=1, le=1000)] = 50) -> dict[str, Any]:
        """Show the latest decision records, newest first."""
        return {"decisions": [r.to_json() for r in self._dispatcher.records.latest(limit)]}

    def _member(self, worker_id: str) -> Member:
        member = self._registry.members.get(worker_id)
        if member is None:
            known = ", ".join(self._registry.members) or "none"
            message = f"no worker {worker_id[:80]!r}; known are {known}"
            raise ApiError(404, message, code="worker_not_found")
        return member

    def _show(self, member: Member) -> dict[str, Any]:
        snapshot = member.snapshot
        account = self._dispatcher.scheduler.ledger.workers.get(member.worker_id)
        shown: dict[str, Any] = {
            "id": member.worker_id,
            "url": member.origin.url,
            "role": (snapshot.role if snapshot else member.role).value,
            "state": "draining" if member.draining else "ready" if snapshot else "down",
            "trouble": member.trouble,
            "in_flight": account.in_flight if account else 0,
        }
        if account is not None:
            shown["latency_model"] = asdict(account.model.corrected)
        if snapshot is not None:
            shown |= {
                "engine": snapshot.engine,
                "models": list(snapshot.models),
                "connector": snapshot.connector,
                "pairing_key": snapshot.pairing_key,
                "pairing": pairing_fields(snapshot.pairing_key),
                "why_whole": _why_whole(member, snapshot),
                **pairs_of(snapshot, self._dispatcher.scheduler.ledger, self._dispatcher.clock()),
                "max_running": snapshot.max_running,
                "running": snapshot.running,
                "waiting": snapshot.waiting,
                "kv_used_tokens": snapshot.kv_used_tokens,
                "kv_capacity_tokens": snapshot.kv_capacity_tokens,
                "max_context_tokens": snapshot.max_context_tokens,
                "prefill_tok_s": snapshot.prefill_tok_s,
                "decode_tok_s": snapshot.decode_tok_s,
                "notes": list(snapshot.notes),
            }
        return shown


def _why_whole(member: Member, snapshot: WorkerSnapshot) -> str | None:
    """Why a worker takes no part in hand-offs, in its dialect's words where it has some."""
    if snapshot.connector:
        return None
    said: object = getattr(member.backend, "why_whole", "")
    known = said if isinstance(said, str) else ""
    return known or f"{snapshot.engine} has no way to move KV"


def _card(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "splitserve"}
