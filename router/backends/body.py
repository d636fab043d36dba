"""A client's JSON body with a few top-level fields changed and the others as they were."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import msgspec

HANDOVER_FIELDS = (
    "kv_transfer_params",
    "ec_transfer_params",
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "routed_dp_rank",
    "disagg_prefill_dp_rank",
    "id_slot",
    "cache_prompt",
)
"""Fields by which engines are told where KV is: the router's to set, never a client's."""
MEDIA = re.compile(rb'"type"\s*:\s*"(?:image_url|input_image|input_audio|video_url|file)"')
"""Parts of a chat that are not text."""
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


def without(body: bytes, names: Iterable[str] = HANDOVER_FIELDS) -> bytes:
    """Return `body` without the fields `names`: the same bytes where it has none of them.

    Raises msgspec.DecodeError.
    """
    known = _DECODER.decode(body)
    dropped = [name for name in names if name in known]
    return with_fields(body, {}, dropped) if dropped else body
