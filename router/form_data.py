"""One field of a `multipart/form-data` body, found without taking the body apart.

Uploads (audio transcriptions and the like) name their model in such a field. All other bytes are
nobody's business here (RFC 7578, RFC 2046 section 5.1).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_MAX_PARTS = 256
_HEAD_LIMIT_BYTES = 16 * 1024
_BOUNDARY = re.compile(rb';\s*boundary=(?:"([^"\r\n]{1,70})"|([^\s;"]{1,70}))', re.IGNORECASE)
_NAME = re.compile(rb'^content-disposition:[^\r\n]*;\s*name="([^"\r\n]*)"', re.I | re.M)


@dataclass(frozen=True, slots=True)
class FormField:
    """Where the value of a field lies in a body."""

    value: bytes
    start: int
    end: int


def boundary_of(content_type: bytes) -> bytes | None:
    """Return what parts the body, or None when the header does not say."""
    found = _BOUNDARY.search(content_type)
    return (found[1] or found[2]) if found else None


def find_field(body: bytes, boundary: bytes, name: bytes) -> FormField | None:
    """Return the first field of this name. Raises ValueError for a body that is not well formed."""
    mark = b"\r\n--" + boundary
    at = len(mark) - 2 if body.startswith(mark[2:]) else _after(body, mark, 0, "no part begins")
    for _ in range(_MAX_PARTS):
        if body[at : at + 2] == b"--":
            return None
        head_end = body.find(b"\r\n\r\n", at, at + _HEAD_LIMIT_BYTES)
        if head_end < 0:
            raise ValueError("the head of a part does not end")
        end = body.find(mark, head_end + 2)
        if end < 0:
            raise ValueError("a part does not end")
        found = _NAME.search(body[at + 2 : head_end])
        if found is not None and found[1] == name:
            start = min(head_end + 4, end)
            return FormField(body[start:end], start, end)
        at = end + len(mark)
    raise ValueError(f"it has more than {_MAX_PARTS} parts")


def with_value(body: bytes, field: FormField, value: bytes) -> bytes:
    """Return the body with another value in this field and all other bytes as they were."""
    return b"".join((body[: field.start], value, body[field.end :]))


def _after(body: bytes, mark: bytes, start: int, trouble: str) -> int:
    at = body.find(mark, start)
    if at < 0:
        raise ValueError(trouble)
    return at + len(mark)
