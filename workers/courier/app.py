"""The courier's HTTP service, beside one llama-server and in its `--slot-save-path` folder.

    GET    /health        open: it lives
    GET    /profile       folder id, room, the model file's hash, whether it converts
    POST   /seal          check a file that the engine saved; answers checksum, ticket, layout
    GET    /files/{name}  a sealed file's bytes, for the bearer of its ticket
    POST   /pull          fetch a sealed file from another courier, check it, give it its name
    POST   /convert       write a slot file from what vLLM's ExampleConnector left
    DELETE /files/{name}  delete a file

All but the first and the fourth ask for `Authorization: Bearer KEY` where the courier has a key.
Whoever asks for a pull and leaves ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import time
from collections.abc import AsyncIterator, Awaitable
from dataclasses import asdict
from typing import Any, TypeVar

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response
from starlette.exceptions import HTTPException

from workers.courier.conversion import Converter
from workers.courier.errors import (
    BadFileName,
    BadSlotFile,
    CannotConvert,
    CourierError,
    FolderFull,
    ForeignSource,
    KvMissing,
    NotSealed,
    SourceFailed,
)
from workers.courier.model_file import ModelFile
from workers.courier.store import Promise, Store
from workers.courier.transfer import Puller, Source
from workers.courier.wire import ConvertWish, PullWish, SealWish

log = logging.getLogger("splitserve.courier")

_SWEEP_S = 30.0
_STATUS: dict[type[CourierError], int] = {
    BadFileName: 400,
    ForeignSource: 403,
    NotSealed: 404,
    KvMissing: 404,
    BadSlotFile: 409,
    CannotConvert: 422,
    SourceFailed: 502,
    FolderFull: 507,
}
_GONE = 499  # nobody reads it
T = TypeVar("T")


class _File(FileResponse):
    chunk_size = 1 << 20


class Courier:
    """What the routes share."""

    def __init__(
        self, store: Store, puller: Puller, key: str, model: ModelFile | None, converter: Converter
    ) -> None:
        self.store = store
        self.puller = puller
        self.model = model
        self.converter = converter
        self._key = key.encode()

    def check_key(self, request: Request) -> None:
        """Raise HTTPException 401 unless the request carries the key."""
        if self._key and not hmac.compare_digest(_bearer(request).encode("latin-1"), self._key):
            raise HTTPException(401, "the key is wrong or missing; send Authorization: Bearer KEY")

    async def sweep(self) -> None:
        """Remove old files, now and from time to time."""
        while True:
            try:
                removed = await asyncio.to_thread(self.store.sweep, time.time())
            except OSError as error:
                log.warning("old slot files stay: %s; see to the folder", error)
            else:
                if removed:
                    log.info("removed %d slot files that nobody came for", removed)
            await asyncio.sleep(_SWEEP_S)

    def profile(self) -> dict[str, Any]:
        """What the router asks once and then now and again."""
        return {
            "folder": self.store.folder_id,
            "max_bytes": self.store.max_bytes,
            "used_bytes": self.store.used_bytes(),
            "model": None if self.model is None else asdict(self.model),
            "converts": self.converter.ready,
        }


def create_app(courier: Courier) -> FastAPI:
    """Build the application."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        sweeping = asyncio.create_task(courier.sweep())
        yield
        sweeping.cancel()
        await asyncio.gather(sweeping, return_exceptions=True)
        courier.puller.close()

    app = FastAPI(title="splitserve courier", docs_url=None, redoc_url=None, lifespan=lifespan)
    app.add_exception_handler(CourierError, _refused)
    app.add_exception_handler(OSError, _disk_trouble)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(RequestValidationError, _bad_wish)
    _add_open_routes(app, courier)
    _add_keyed_routes(app, courier)
    return app


def _add_open_routes(app: FastAPI, courier: Courier) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/files/{name}")
    async def file(name: str, request: Request) -> Response:
        path = courier.store.ticketed(name, _bearer(request))
        if not path.exists():
            raise NotSealed(name)
        return _File(path, media_type="application/octet-stream")


def _add_keyed_routes(app: FastAPI, courier: Courier) -> None:
    keyed = [Depends(courier.check_key)]
    store = courier.store

    @app.get("/profile", dependencies=keyed)
    async def profile() -> dict[str, Any]:
        return await asyncio.to_thread(courier.profile)

    @app.post("/seal", dependencies=keyed)
    async def seal(wish: SealWish) -> dict[str, Any]:
        promise = Promise(wish.name, wish.size_bytes, wish.tokens, wish.digest)
        sealed = await asyncio.to_thread(store.seal, promise)
        return {**asdict(sealed), "folder": store.folder_id}

    @app.post("/pull", dependencies=keyed)
    async def pull(wish: PullWish, request: Request) -> Response:
        given, source = wish, wish.source
        promise = Promise(given.name, given.size_bytes, given.tokens, given.digest, given.checksum)
        origin = Source(source.url, source.folder, source.ticket)
        moved = await _while_wanted(request, courier.puller.pull(promise, origin))
        return JSONResponse(asdict(moved)) if moved is not None else Response(status_code=_GONE)

    @app.post("/convert", dependencies=keyed)
    async def convert(wish: ConvertWish) -> dict[str, Any]:
        made = await courier.converter.convert(wish)
        return asdict(made)

    @app.delete("/files/{name}", dependencies=keyed)
    async def discard(name: str) -> dict[str, bool]:
        return {"deleted": await asyncio.to_thread(store.discard, name)}


async def _while_wanted(request: Request, work: Awaitable[T]) -> T | None:
    """Do `work` for as long as somebody waits for it; None when nobody does any more."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        return None
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _bearer(request: Request) -> str:
    kind, _, word = request.headers.get("authorization", "").partition(" ")
    return word.strip() if kind.lower() == "bearer" else ""


def _error(status: int, message: str, code: str) -> JSONResponse:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse(
        {"error": {"message": message, "type": kind, "param": None, "code": code}}, status
    )


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, CourierError)
    log.warning("%s %s: %s", request.method, request.url.path, error)
    return _error(_STATUS.get(type(error), 500), str(error), _code(type(error).__name__))


async def _disk_trouble(request: Request, error: Exception) -> Response:
    log.warning("%s %s: %s", request.method, request.url.path, error)
    return _error(507, f"the folder of slot files failed: {error}; see to the disk", "disk_trouble")


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(error.status_code, str(error.detail), "http_error")


async def _bad_wish(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    return _error(400, f"{place}: {first['msg']}; see the courier's wire.py", "bad_wish")


def _code(name: str) -> str:
    """BadSlotFile -> bad_slot_file."""
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")
