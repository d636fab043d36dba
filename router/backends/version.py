"""The version an engine says it is, for people."""

from __future__ import annotations

import msgspec

from router.backends.probing import get_json
from router.errors import UpstreamError
from router.origin import Origin
from router.upstream import Upstream
from router.wire import Headers
from splitserve.messages import WorkerSnapshot

_NOTE = "version "
_ROUTES = {
    "native": (b"/splitserve/profile", "version"),
    "vllm": (b"/version", "version"),
    "sglang": (b"/server_info", "version"),
    "llama.cpp": (b"/props", "build_info"),
}


def version_in(snapshot: WorkerSnapshot) -> str:
    """Return the version among the notes of a probe; "" without one."""
    found = (note.removeprefix(_NOTE) for note in snapshot.notes if note.startswith(_NOTE))
    return next(found, "")


async def engine_version(
    upstream: Upstream, origin: Origin, headers: Headers, snapshot: WorkerSnapshot
) -> str:
    """Return what a probe has noted, else ask. "" where the engine does not tell; never raises."""
    known = version_in(snapshot)
    if known or snapshot.engine not in _ROUTES:
        return known
    path, field = _ROUTES[snapshot.engine]
    try:
        status, body = await get_json(upstream, origin, path, headers)
        told = msgspec.json.decode(body).get(field) if status == 200 else ""
    except (UpstreamError, msgspec.DecodeError, AttributeError):
        return ""
    return told if isinstance(told, str) else ""
