"""What keeps a client from making the router hold more than it should: heads and small bodies."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from router.api.errors import ApiError

HEAD_LIMIT_BYTES = 64 * 1024
SMALL_BODY_BYTES = 1 << 20


class BoundedHttp(HttpToolsProtocol):
    """The server's protocol with a bound on heads, and the OpenAI envelope for broken HTTP.

    A head may be longer by what one read of the socket brings, since reads are not cut.
    """

    _head_bytes = 0  # of a head that is not whole
    _in_head = True

    def data_received(self, data: bytes) -> None:
        """Take bytes from the client."""
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > HEAD_LIMIT_BYTES and not self.transport.is_closing():
            message = f"the request's head is over {HEAD_LIMIT_BYTES} bytes; send less"
            self._refuse(ApiError(431, message, code="head_too_large"))

    def on_headers_complete(self) -> None:
        """Begin with the body."""
        self._in_head, self._head_bytes = False, 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Expect the next head."""
        self._in_head = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP."""
        self._refuse(ApiError(400, f"{msg} Send HTTP/1.1", code="invalid_http"))

    def _refuse(self, error: ApiError) -> None:
        body = error.body()
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[error.status] + head % len(body) + body)
        self.transport.close()


class SmallBodies:
    """Bounds the bodies of all routes but `/v1/...`, which has a limit of its own."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the request."""
        if scope["type"] != "http" or scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        size_bytes = 0

        async def bounded() -> Message:
            nonlocal size_bytes
            message = await receive()
            size_bytes += len(message.get("body", b""))
            if size_bytes > SMALL_BODY_BYTES:
                raise ApiError(413, f"the body is over {SMALL_BODY_BYTES} bytes; send less")
            return message

        await self._app(scope, bounded, send)
