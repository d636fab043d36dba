"""A client's JSON body with a few top-level fields changed and the others as they were."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])


def with_fields(body: bytes, fields: Mapping[str, object], drop: Iterable[str] = ()) -> bytes:
    """Return `body` with `fields` set and those of `drop` left out; values are plain JSON.

    The intake has parsed the body once, so it is an object. Raises msgspec.DecodeError otherwise.
    """
    known = _DECODER.decode(body)
    for name in drop:
        known.pop(name, None)
    known.update({name: msgspec.Raw(msgspec.json.encode(each)) for name, each in fields.items()})
    return msgspec.json.encode(known)


def fields_of(body: bytes) -> dict[str, msgspec.Raw]:
    """Return the top-level fields, each as it was written. Raises msgspec.DecodeError."""
    return _DECODER.decode(body)
