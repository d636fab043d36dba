"""A stream whose first event is an error is an error, whatever its status says.

Engines open a stream with 200 before they know whether they can answer. As long as nothing has
gone to the client, such an answer is as good as a status, and another attempt may go better.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

import msgspec

from router.event_stream import EventCutter, is_event_stream
from router.upstream import UpstreamResponse
from router.wire import Headers

_JSON: Headers = ((b"content-type", b"application/json"),)


class OpenedStream:
    """An `UpstreamResponse` of which the first bytes were read; they come first when iterating.

    With an `error` (status and body) this is all there is, whatever may follow.
    """

    def __init__(
        self, inner: UpstreamResponse, held: bytes, error: tuple[int, bytes] | None
    ) -> None:
        self._inner = inner
        self._failed = error is not None
        self.status, self._held = error or (inner.status, held)
        self.headers = _JSON if self._failed else inner.headers

    @property
    def at_end(self) -> bool:
        """Nothing of the body is left."""
        return not self._held and (self._failed or self._inner.at_end)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        """The next bytes of the body."""
        held, self._held = self._held, b""
        if self._failed and not held:
            raise StopAsyncIteration
        return held or await anext(self._inner)

    async def read(self, limit_bytes: int) -> bytes:
        """The rest of the body. Raises ReplyTooLarge beyond `limit_bytes`, and as iterating."""
        held, self._held = self._held, b""
        return held if self._failed else held + await self._inner.read(limit_bytes - len(held))

    def close(self) -> None:
        """Close the answer."""
        self._inner.close()

    def on_close(self, callback: Callable[[], None]) -> None:
        """Call this once when the answer is closed."""
        self._inner.on_close(callback)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


async def opened(response: UpstreamResponse) -> UpstreamResponse:
    """Wait for a stream's first event; an error in it becomes the status and body of the answer.

    Other answers are returned as they are. Closes the answer when waiting fails. Raises
    UpstreamError.
    """
    if response.status != 200 or not is_event_stream(response.headers):
        return response
    cutter, first = EventCutter(), b""
    held: list[bytes] = []
    try:
        while not first and (piece := await anext(response, b"")):
            held.append(piece)
            first = cutter.whole(piece)
    except BaseException:
        response.close()
        raise
    return OpenedStream(response, b"".join(held), error_in(first))


class _Error(msgspec.Struct):
    message: str = ""
    code: int | str | None = None


class _Event(msgspec.Struct):
    error: _Error


def error_in(events: bytes) -> tuple[int, bytes] | None:
    """Return status and body of the error that the first of `events` with data is; else None."""
    data = next((line[5:] for line in events.splitlines() if line.startswith(b"data:")), b"")
    try:
        code = msgspec.json.decode(data, type=_Event).error.code
    except msgspec.DecodeError:
        return None
    return (code if isinstance(code, int) and 400 <= code < 600 else 500), data.strip()
