"""Slot files of a toy model, whole and well formed."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from workers.courier.slot_head import MAGIC, VERSION

LAYERS = 2
ROW_BYTES = 8
_F16 = 1


def slot_file(token_ids: Sequence[int], streams: int = 1) -> bytes:
    """The file of a slot that holds `token_ids`; its KV follows from them alone."""
    n = len(token_ids)
    words = (-1, 1, n, *token_ids, 0)
    head = struct.pack("<III", MAGIC, VERSION, len(words)) + struct.pack(f"<{len(words)}i", *words)
    cells = b"".join(struct.pack("<iIi", position, 1, 0) for position in range(n))
    rows = b"".join(struct.pack("<q", token) for token in token_ids)
    layer = struct.pack("<iQ", _F16, ROW_BYTES) + rows
    cache = struct.pack("<I", n) + cells + struct.pack("<IIII", 0, LAYERS, 0, 0)
    cache += layer * (2 * LAYERS)
    return head + struct.pack("<I", streams) + cache + bytes(4 * (streams - 1))
