"""What a slot file says of itself: its tokens, and how its KV is laid out. The KV is skipped.

The format is described in `slot_file`, which reads the KV too, of fewer kinds of models. Here
several caches may follow one another (sliding windows), V may be transposed (`-fa off`) and any
ggml type will do; what is none of these has no layout. A file may hold anything at all: nothing
beyond its end is read, and no number in it is trusted.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import xxhash

from workers.courier.errors import BadSlotFile

MAGIC = 0x67677371
VERSION = 4
_WORD_BYTES = 4
_NO_MEDIA = 0
_PLAIN_TEXT = (-1, 1)
_CELL_BYTES = 12
_MOST_STREAMS = 1024
_MOST_LAYERS = 4096
# By their numbers in ggml.h; others go by their number.
_TYPES = {
    0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 20: "iq4_nl",
    30: "bf16",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """How a server lays out its KV: what must be equal for another one to restore its files.

    `kv` are the types of K and V, `shape` the rows of each cache, `bytes_per_token` all of them.
    """

    kv: str
    v_order: str
    streams: int
    shape: str
    bytes_per_token: int


def tokens_digest(token_ids: Sequence[int]) -> str:
    """Return the digest by which a file's tokens are compared: xxh3-64 of them as i32, in hex."""
    return xxhash.xxh3_64_hexdigest(struct.pack(f"<{len(token_ids)}i", *token_ids))


def check_head(path: Path, size_bytes: int, tokens: int, digest: str) -> None:
    """Raise BadSlotFile unless the file has this size and holds just these tokens; OSError."""
    actual_bytes = path.stat().st_size
    if actual_bytes != size_bytes:
        raise BadSlotFile(path, f"it has {actual_bytes} bytes, not {size_bytes}")
    with path.open("rb") as file:
        found, raw = _tokens(path, file, size_bytes)
    if found != tokens or xxhash.xxh3_64_hexdigest(raw) != digest:
        raise BadSlotFile(path, f"it holds {found} other tokens than the {tokens} of the prompt")


def _tokens(path: Path, file: BinaryIO, size_bytes: int) -> tuple[int, bytes]:
    """Return how many tokens the file is for, and them as bytes. `file` stands behind them then."""
    head = file.read(12)
    if len(head) < 12:
        raise BadSlotFile(path, f"it ends at byte {len(head)}, within its head")
    magic, version, n_words = struct.unpack("<III", head)
    if (magic, version) != (MAGIC, VERSION):
        raise BadSlotFile(
            path, f"magic {magic:#x} and version {version}, not {MAGIC:#x} and {VERSION}"
        )
    words_bytes = n_words * _WORD_BYTES
    if 12 + words_bytes > size_bytes:
        raise BadSlotFile(path, f"it ends at byte {size_bytes}, within its tokens")
    words = file.read(words_bytes)
    count = n_words - len(_PLAIN_TEXT) - 2  # the number of tokens before them, 0 media after them
    if count < 0 or struct.unpack_from("<3i", words) != (*_PLAIN_TEXT, count):
        raise BadSlotFile(path, "its token list is not plain text of one sequence")
    if words[-_WORD_BYTES:] != struct.pack("<i", _NO_MEDIA):
        raise BadSlotFile(path, "it holds more than text")
    return count, words[3 * _WORD_BYTES : -_WORD_BYTES]


def read_layout(path: Path) -> SlotLayout | None:
    """Return the layout of a file with a whole head; None for a kind that is not understood."""
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        _tokens(path, file, size_bytes)
        try:
            caches = []
            while file.tell() < size_bytes:
                caches.append(_Cache.read(file, size_bytes))
        except (struct.error, _Unknown):
            return None
    if not caches or any(cache.layers == 0 for cache in caches):
        return None
    return SlotLayout(
        kv=_joined(f"{cache.k_type}/{cache.v_type}" for cache in caches),
        v_order=_joined("columns" if cache.transposed else "rows" for cache in caches),
        streams=max(cache.streams for cache in caches),
        shape="+".join(f"{cache.layers}x{cache.k_row}/{cache.v_row}" for cache in caches),
        bytes_per_token=sum(cache.bytes_per_token for cache in caches),
    )


def _joined(words: Iterable[str]) -> str:
    """Each word once, in order: layers that are alike are told of once."""
    return "+".join(dict.fromkeys(words))


class _Unknown(Exception):
    """The file is of a kind that is not understood."""


@dataclass(slots=True)
class _Cache:
    """One KV cache of a file. Rows are bytes of all KV heads of one token in one layer."""

    streams: int
    transposed: bool = False
    layers: int = 0
    k_type: str = ""
    v_type: str = ""
    k_row: str = ""
    v_row: str = ""
    bytes_per_token: int = 0

    @classmethod
    def read(cls, file: BinaryIO, size_bytes: int) -> _Cache:
        (streams,) = _take(file, "<I")
        if not 0 < streams <= _MOST_STREAMS:
            raise _Unknown
        cache = cls(streams)
        for _ in range(streams):
            (cells,) = _take(file, "<I")
            if cells:
                cache._read_stream(file, size_bytes, cells)
        return cache

    def _read_stream(self, file: BinaryIO, size_bytes: int, cells: int) -> None:
        _skip(file, cells * _CELL_BYTES, size_bytes)
        transposed, layers, *_ = _take(file, "<IIII")
        if transposed > 1 or not 0 < layers <= _MOST_LAYERS:
            raise _Unknown
        self.transposed, self.layers = bool(transposed), layers
        k = [_rows(file, size_bytes, cells) for _ in range(layers)]
        read_v = _columns if transposed else _rows
        v = [read_v(file, size_bytes, cells) for _ in range(layers)]
        self.k_type, self.v_type = (_joined(kind for kind, _ in each) for each in (k, v))
        self.k_row, self.v_row = (_joined(str(row) for _, row in each) for each in (k, v))
        self.bytes_per_token = sum(row for _, row in (*k, *v)) + _CELL_BYTES + _WORD_BYTES


def _rows(file: BinaryIO, size_bytes: int, cells: int) -> tuple[str, int]:
    kind, row_bytes = _take(file, "<iQ")
    _skip(file, row_bytes * cells, size_bytes)
    return _TYPES.get(kind, str(kind)), row_bytes


def _columns(file: BinaryIO, size_bytes: int, cells: int) -> tuple[str, int]:
    kind, value_bytes, values = _take(file, "<iII")
    _skip(file, value_bytes * values * cells, size_bytes)
    return _TYPES.get(kind, str(kind)), value_bytes * values


def _take(file: BinaryIO, form: str) -> tuple[int, ...]:
    return struct.unpack(form, file.read(struct.calcsize(form)))


def _skip(file: BinaryIO, count_bytes: int, size_bytes: int) -> None:
    if file.tell() + count_bytes > size_bytes:
        raise _Unknown
    file.seek(count_bytes, 1)
