"""Server-sent events on their way through: where they end, and which is the first with a token."""

from __future__ import annotations

import msgspec

from router.wire import Headers

_LF, _CRLF = b"\n\n", b"\r\n\r\n"
_HELD_LIMIT_BYTES = 256 * 1024


class _Choice(msgspec.Struct):
    delta: dict[str, msgspec.Raw] | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice]


_CHUNK = msgspec.json.Decoder(_Chunk)
_NOTHING = frozenset((b"null", b'""', b"[]", b"{}"))


def is_event_stream(headers: Headers) -> bool:
    """Say whether a body is server-sent events."""
    return any(
        name == b"content-type" and value.lower().startswith(b"text/event-stream")
        for name, value in headers
    )


class EventCutter:
    """Hands on whole events, so that a stream which breaks inside of one never shows half of it.

    An event of more than 256 KiB is not held back any longer.
    """

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held = b""

    def whole(self, piece: bytes) -> bytes:
        """Return what may go on now that `piece` has come; what is left waits."""
        if self._held:
            piece = self._held + piece
            self._held = b""
        if piece.endswith((_LF, _CRLF)):
            return piece
        lf, crlf = piece.rfind(_LF), piece.rfind(_CRLF)
        end = max(lf + len(_LF) if lf >= 0 else 0, crlf + len(_CRLF) if crlf >= 0 else 0)
        if len(piece) - end > _HELD_LIMIT_BYTES:
            return piece
        self._held = piece[end:]
        return piece[:end]

    def rest(self) -> bytes:
        """Return what waits, for a stream that ended as it should."""
        held, self._held = self._held, b""
        return held


def bears_token(events: bytes) -> bool:
    """Say whether any of these events shows that decoding has begun.

    Comments, chunks without choices and chunks that only name the role do not; anything that is
    not understood does, since then its first byte is all there is to go by.
    """
    lines = (line for line in events.splitlines() if line.startswith(b"data:"))
    return any(_tells_of_decoding(line[5:].strip()) for line in lines)


def _tells_of_decoding(data: bytes) -> bool:
    try:
        choices = _CHUNK.decode(data).choices
    except msgspec.DecodeError:
        return True
    return any(
        choice.finish_reason is not None
        or choice.text
        or any(
            name != "role" and bytes(value) not in _NOTHING
            for name, value in (choice.delta or {}).items()
        )
        for choice in choices
    )
