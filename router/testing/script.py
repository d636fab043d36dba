"""What a fake backend does with one request: every knob has a default that means "behave"."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Literal

Cut = Literal["fin", "rst"]
Framing = Literal["chunked", "length", "close"]


@dataclass(frozen=True, slots=True)
class Script:
    """One request's behaviour. Delays are seconds on the event loop's clock.

    A header ``x-fake: {json}`` of the request overrides any field by its name.
    """

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    header_delay_s: float = 0.0
    """From the whole request read to the status line."""
    first_chunk_delay_s: float = 0.0
    """From the status line to the first byte of the body."""
    chunk_delay_s: float = 0.0
    """Between two chunks; 0 still gives each chunk its own write in its own turn of the loop."""
    chunks: int | None = None
    """Output tokens, one a chunk; None takes the request's limit, or 16."""
    chunk_bytes: int = 0
    """Least size of a chunk's text, filled up with dots."""
    split_bytes: int = 0
    """Above 0: the stream is cut into writes of this many bytes, wherever that falls."""
    framing: Framing = "chunked"
    """How a stream's end is marked; "length" holds the stream back and sends it as one body."""
    cut: Cut | None = None
    """End the connection after ``cut_after_chunks`` chunks (plain reply: half the body)."""
    cut_after_chunks: int = 0
    cut_before_headers: bool = False
    silent: bool = False
    """Read the request and never answer."""
    silent_after_chunks: int | None = None
    raw: str | None = None
    """Sent as it is (latin-1) in place of an answer, then the connection is closed by FIN."""
    merge: Mapping[str, object] = field(default_factory=dict)
    """Top-level fields laid over every JSON object that is sent."""
    drop: tuple[str, ...] = ()
    """Top-level fields left out of every JSON object that is sent."""
    finish_reason: str | None = "length"
    usage: bool = True
    done: bool = True
    """Whether a stream ends with ``data: [DONE]``."""
    keep_alive: bool = True
    """False: answer with ``connection: close`` and close."""

    def overridden(self, header: str) -> "Script":
        """The script with the fields of a JSON object laid over it.

        Raises ValueError for broken JSON, anything but an object, or an unknown field.
        """
        given = json.loads(header)
        if not isinstance(given, dict):
            raise ValueError("x-fake must be a JSON object")
        unknown = given.keys() - {f.name for f in fields(self)}
        if unknown:
            raise ValueError(f"x-fake has unknown fields: {', '.join(sorted(unknown))}")
        if "drop" in given:
            given["drop"] = tuple(given["drop"])
        return replace(self, **given)
