"""Composition root of the router: one process, one event loop, one scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
from collections.abc import AsyncIterator, Mapping
from time import monotonic

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from router.api.auth import Keyring
from router.api.errors import ApiError
from router.api.generate import GenerateEndpoint
from router.api.limits import BoundedHttp, SmallBodies
from router.api.state import StateRoutes
from router.backends.base import WorkerOptions
from router.dispatch import Dispatcher
from router.event_log import EventLogFile
from router.origin import parse_origin
from router.pair_watch import PairWatch
from router.planner import Planner
from router.registry import Registry
from router.reuse import ReuseWatch
from router.sections import WorkerSpec
from router.settings import RouterSettings
from router.shadow import ShadowChecker
from router.telemetry.metrics import RouterMetrics
from router.telemetry.records import RecordStore
from router.upstream import HttpUpstream
from router.wire import Deadlines
from splitserve.scheduling import Scheduler, SchedulerLimits
from splitserve.scheduling.policies.catalog import by_name

log = logging.getLogger("splitserve.router")


class RouterApp:
    """The router's parts, wired. `asgi` is what a server runs."""

    def __init__(self, settings: RouterSettings, environ: Mapping[str, str]) -> None:
        limits = settings.limits
        self.settings = settings
        self._environ = environ
        self.scheduler = Scheduler(
            by_name(settings.policy),
            limits=SchedulerLimits(limits.queue, limits.attempts, limits.max_wait_s),
        )
        self._event_log = EventLogFile(settings.event_log) if settings.event_log else None
        self.dispatcher = Dispatcher(
            self.scheduler, monotonic, RecordStore(), RouterMetrics(), self._event_log
        )
        self.upstream = HttpUpstream()
        deadlines = Deadlines(limits.connect_s, limits.first_byte_s, limits.idle_s)
        self.registry = Registry(
            self.dispatcher,
            self.upstream,
            interval_s=settings.report_interval_s,
            deadlines=deadlines,
            probe_speeds=settings.probe_speeds,
        )
        keyring = Keyring(settings, environ)
        self.dispatcher.on_suspicion = self.registry.poke
        self.planner = Planner(self.dispatcher, self.registry)
        reuse = ReuseWatch(self.dispatcher)
        shadow = ShadowChecker(self.dispatcher, settings.shadow_check, random.Random())
        self.pair_watch = PairWatch(reuse, shadow)
        self.dispatcher.on_recompute = reuse.saw_counters
        self.generate = GenerateEndpoint(self.dispatcher, settings, keyring, self.pair_watch)
        state = StateRoutes(self.dispatcher, self.registry, keyring, tuple(settings.models))
        self.api = _build_api(self._lifespan, state, self.generate)
        self.asgi: ASGIApp = HotRoute(self.generate, SmallBodies(self.api))

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        for spec in self.settings.worker_specs:
            if spec.url is not None:
                options = options_of(spec, self._environ)
                self.registry.add(spec.url, spec.role, spec.name or "", options)
        planning = asyncio.create_task(self.planner.run())
        try:
            yield
        finally:
            planning.cancel()
            await asyncio.gather(planning, return_exceptions=True)
            await self.pair_watch.stop()
            await self.registry.stop()
            await self.dispatcher.shutdown()
            self.upstream.close()
            if self._event_log is not None:
                self._close_log(self._event_log)

    @staticmethod
    def _close_log(event_log: EventLogFile) -> None:
        try:
            event_log.close()
        except OSError as error:
            log.error("the event log has no end: %s", error)


def options_of(spec: WorkerSpec, environ: Mapping[str, str]) -> WorkerOptions:
    """Return what a worker's entry says beyond its address, its keys read."""
    key = environ.get(spec.key_env, "") if spec.key_env else ""
    return WorkerOptions(
        engine=spec.engine or "",
        model=spec.model or "",
        engine_model=spec.engine_model or "",
        max_running=spec.max_running or 0,
        headers=((b"authorization", b"Bearer " + key.encode()),) if key else (),
        kv=spec.kv,
        kv_events=str(spec.kv_events or ""),
        courier=parse_origin(spec.courier) if spec.courier else None,
        courier_key=environ.get(spec.courier_key_env, "") if spec.courier_key_env else "",
    )


class HotRoute:
    """Answers `POST /v1/...` before FastAPI, whose matching and layers cost as much as a relay."""

    def __init__(self, generate: ASGIApp, rest: ASGIApp) -> None:
        self._generate = generate
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send a request its way."""
        http = scope["type"] == "http"
        hot = http and scope["method"] == "POST" and scope["path"].startswith("/v1/")
        await (self._generate if hot else self._rest)(scope, receive, send)


def _build_api(lifespan: object, state: StateRoutes, generate: GenerateEndpoint) -> FastAPI:
    api = FastAPI(title="splitserve", lifespan=lifespan)  # type: ignore[arg-type]
    api.add_exception_handler(ApiError, _answer_api_error)
    api.add_exception_handler(HTTPException, _answer_http_error)
    api.add_exception_handler(RequestValidationError, _answer_validation_error)
    api.add_exception_handler(Exception, _answer_bug)
    state.add_to(api)
    api.router.routes.append(Route("/v1/{rest:path}", generate, methods=["POST"]))
    return api


async def _answer_api_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return JSONResponse(error.envelope(), error.status)


async def _answer_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:200]}: {error.detail}"
    envelope = ApiError(error.status_code, message).envelope()
    return JSONResponse(envelope, error.status_code, error.headers)


async def _answer_bug(request: Request, error: Exception) -> JSONResponse:
    message = "the router made an error; its log says more"
    return JSONResponse(ApiError(500, message, code="internal_error").envelope(), 500)


async def _answer_validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    known = ApiError(400, f"{where}: {first['msg']}", code="invalid_value", param=where)
    return JSONResponse(known.envelope(), 400)


def build_server(app: RouterApp) -> uvicorn.Server:
    """Return the server, not started. Streams get `drain_s` to end when it is told to stop."""
    settings = app.settings
    config = uvicorn.Config(
        app.asgi,
        host=settings.listen.host,
        port=settings.listen.port,
        interface="asgi3",
        proxy_headers=False,
        loop="uvloop",
        http=BoundedHttp,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(settings.limits.drain_s),
        timeout_keep_alive=75,
    )
    return uvicorn.Server(config)


def serve(settings: RouterSettings) -> int:
    """Run the router until SIGINT or SIGTERM. Returns the exit status."""
    server = build_server(RouterApp(settings, os.environ))
    server.run()
    return 0 if server.started else 1
