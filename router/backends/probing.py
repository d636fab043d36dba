"""Small questions to a worker, under short deadlines."""

from __future__ import annotations

from router.origin import Origin
from router.upstream import Upstream
from router.wire import Deadlines, Headers

PROBE_DEADLINES = Deadlines(connect_s=2.0, first_byte_s=5.0, idle_s=5.0, total_s=10.0)
_LIMIT_BYTES = 4 << 20


async def get_json(
    upstream: Upstream, origin: Origin, path: bytes, headers: Headers = ()
) -> tuple[int, bytes]:
    """GET a small document from a worker; returns status and body. Raises UpstreamError."""
    async with await upstream.request(
        origin, b"GET", path, headers=headers, deadlines=PROBE_DEADLINES
    ) as response:
        return response.status, await response.read(_LIMIT_BYTES)
