"""llama.cpp's slot file: what `POST /slots/N?action=save` writes and `action=restore` reads.

Little endian: u32 magic, u32 version, u32 count of words, then the words as i32: -1, 1, n, the n
token ids, 0. Then the KV cache: u32 streams (1), u32 cells; per cell i32 position, u32 1, i32
sequence; u32 0 (V lies token by token, as with `-fa on`), u32 layers, u32 0, u32 0; per layer
i32 ggml type, u64 bytes per row, the n rows of K; then the same for V. A row holds one token's
values of all KV heads. Files of models with sliding windows or recurrent state are others and are
refused. Source: llama.cpp, src/llama-context.cpp, src/llama-kv-cache.cpp, tools/server.

llama.cpp's own reader aborts its process on a file that is cut short, so the reader here trusts
nothing, and the writer writes a whole file or none.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from workers.courier.errors import BadSlotFile, CannotConvert

MAGIC = 0x67677371
VERSION = 4
FloatArray = NDArray[np.float32]
_HEAD_WORDS = (-1, 1)
_TAIL_WORDS = (0,)
_CELL_BYTES = 12
_LAYER = struct.Struct("<iQ")


class KvType(IntEnum):
    """The ggml types a cache may have here, by their numbers in the file.

    Quantised caches are left out: llama.cpp rotates K and V before it quantises them.
    """

    F32 = 0
    F16 = 1
    BF16 = 30

    @property
    def value_bytes(self) -> int:
        """Bytes of one number."""
        return 4 if self is KvType.F32 else 2


@dataclass(frozen=True, slots=True)
class Slot:
    """A slot's tokens and, per layer, its K and V: float32 [n_tokens, values per row]."""

    token_ids: tuple[int, ...]
    kv_type: KvType
    keys: tuple[FloatArray, ...]
    values: tuple[FloatArray, ...]


def size_bytes(n_tokens: int, row_values: Sequence[int], kv_type: KvType) -> int:
    """Return a file's exact size; `row_values`: numbers in a K row (and in a V row) per layer."""
    per_token = 2 * sum(row_values) * kv_type.value_bytes + _CELL_BYTES + 4
    return n_tokens * per_token + _FIXED_BYTES + 2 * _LAYER.size * len(row_values)


_FIXED_BYTES = 12 + 4 * len(_HEAD_WORDS + _TAIL_WORDS) + 4 + 8 + 16


def write_slot(
    path: Path,
    token_ids: Sequence[int],
    layers: Iterable[tuple[FloatArray, FloatArray]],
    *,
    row_values: Sequence[int],
    kv_type: KvType,
) -> int:
    """Write a file for `token_ids` and return its size in bytes.

    `layers` yields K and V of one layer after the other, each float32 [n_tokens, row], and only one
    layer is in memory at a time. On an error no file is left. Raises CannotConvert for a value that
    `kv_type` cannot hold, OSError, and what `layers` raises.
    """
    try:
        with path.open("wb") as file:
            _write(file, token_ids, layers, row_values, kv_type)
            written_bytes = file.seek(0, 2)
        assert written_bytes == size_bytes(len(token_ids), row_values, kv_type)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return written_bytes


def _write(
    file: BinaryIO,
    token_ids: Sequence[int],
    layers: Iterable[tuple[FloatArray, FloatArray]],
    row_values: Sequence[int],
    kv_type: KvType,
) -> None:
    n_tokens = len(token_ids)
    words = [*_HEAD_WORDS, n_tokens, *token_ids, *_TAIL_WORDS]
    file.write(struct.pack("<III", MAGIC, VERSION, len(words)))
    file.write(np.asarray(words, "<i4").tobytes())
    file.write(struct.pack("<II", 1, n_tokens))
    cells = np.zeros((n_tokens, 3), "<i4")
    cells[:, 0] = np.arange(n_tokens)
    cells[:, 1] = 1
    file.write(cells.tobytes())
    file.write(struct.pack("<IIII", 0, len(row_values), 0, 0))
    at = file.tell()
    section_bytes = sum(
        _LAYER.size + n_tokens * row * kv_type.value_bytes for row in row_values
    )  # of K; V is as long, and comes after the K of every layer
    for row, (keys, values) in zip(row_values, layers, strict=True):
        for offset, rows in ((0, keys), (section_bytes, values)):
            assert rows.shape == (n_tokens, row)
            file.seek(at + offset)
            file.write(_LAYER.pack(kv_type, row * kv_type.value_bytes))
            file.write(_packed(rows, kv_type))
        at += _LAYER.size + n_tokens * row * kv_type.value_bytes


def _packed(rows: FloatArray, kv_type: KvType) -> bytes:
    if kv_type is KvType.F32:
        return rows.astype("<f4").tobytes()
    if kv_type is KvType.BF16:
        return float32_to_bf16(rows).astype("<u2").tobytes()
    with np.errstate(over="ignore"):
        half = rows.astype("<f2")
    if not np.isfinite(half).all():
        raise CannotConvert(
            "K or V holds a value that f16 cannot; start llama-server with -ctk f32 -ctv f32, "
            "or bf16, and the courier with that cache type"
        )
    return half.tobytes()


def float32_to_bf16(numbers: FloatArray) -> NDArray[np.uint16]:
    """Round to bfloat16, to nearest even as engines do; the bits as uint16. No NaN comes in."""
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded >> np.uint32(16)).astype(np.uint16)


def bf16_to_float32(bits: NDArray[np.uint16]) -> FloatArray:
    """Widen bfloat16, given as its bits, without loss."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


class _Cursor:
    """Reads a file's bytes in order and refuses to read past their end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._bytes = path.read_bytes()
        self._at = 0

    def take(self, count_bytes: int) -> bytes:
        end = self._at + count_bytes
        if end > len(self._bytes):
            raise self.bad(f"it ends at byte {len(self._bytes)} where {end} were announced")
        piece, self._at = self._bytes[self._at : end], end
        return piece

    def unpack(self, form: str) -> tuple[int, ...]:
        return struct.unpack(form, self.take(struct.calcsize(form)))

    def expect_end(self) -> None:
        if self._at != len(self._bytes):
            raise self.bad(f"{len(self._bytes) - self._at} bytes follow its end")

    def bad(self, cause: str) -> BadSlotFile:
        return BadSlotFile(self._path, cause)


def read_slot(path: Path) -> Slot:
    """Read and check a file to its last byte. Raises BadSlotFile, or OSError."""
    cursor = _Cursor(path)
    token_ids = _read_tokens(cursor)
    n_tokens = len(token_ids)
    streams, cells = cursor.unpack("<II")
    if streams != 1 or cells != n_tokens:
        raise cursor.bad(f"{streams} streams and {cells} cells for {n_tokens} tokens")
    table = np.frombuffer(cursor.take(_CELL_BYTES * n_tokens), "<i4").reshape(n_tokens, 3)
    if not np.array_equal(table[:, 0], np.arange(n_tokens)) or (table[:, 1] != 1).any():
        raise cursor.bad("its positions do not count up from 0 in one sequence")
    transposed, n_layers, *rest = cursor.unpack("<IIII")
    if transposed or any(rest):
        raise cursor.bad("V is transposed, or it is of another kind; save with -fa on")
    keys = [_read_rows(cursor, n_tokens) for _ in range(n_layers)]
    values = [_read_rows(cursor, n_tokens) for _ in range(n_layers)]
    cursor.expect_end()
    kinds = {kind for kind, _ in (*keys, *values)}
    if len(kinds) != 1:
        raise cursor.bad("it has no layer, or K and V differ in type")
    return Slot(
        token_ids, kinds.pop(), tuple(rows for _, rows in keys), tuple(rows for _, rows in values)
    )


def _read_tokens(cursor: _Cursor) -> tuple[int, ...]:
    magic, version, n_words = cursor.unpack("<III")
    if (magic, version) != (MAGIC, VERSION):
        raise cursor.bad(f"magic {magic:#x} and version {version}, not {MAGIC:#x} and {VERSION}")
    words: list[int] = np.frombuffer(cursor.take(4 * n_words), "<i4").tolist()
    head, count, tokens, tail = words[:2], words[2:3], words[3:-1], words[-1:]
    if (tuple(head), tuple(tail)) != (_HEAD_WORDS, _TAIL_WORDS) or count != [len(tokens)]:
        raise cursor.bad("its token list is not plain text of one sequence")
    return tuple(tokens)


def _read_rows(cursor: _Cursor, n_tokens: int) -> tuple[KvType, FloatArray]:
    number, row_bytes = cursor.unpack("<iQ")
    try:
        kind = KvType(number)
    except ValueError:
        raise cursor.bad(f"ggml type {number} is not f16, f32 or bf16") from None
    if row_bytes % kind.value_bytes:
        raise cursor.bad(f"a row of {row_bytes} bytes holds no whole number of values")
    packed = cursor.take(n_tokens * row_bytes)
    if kind is KvType.BF16:
        flat = bf16_to_float32(np.frombuffer(packed, "<u2"))
    else:
        flat = np.frombuffer(packed, "<f4" if kind is KvType.F32 else "<f2").astype(np.float32)
    return kind, flat.reshape(n_tokens, row_bytes // kind.value_bytes)
