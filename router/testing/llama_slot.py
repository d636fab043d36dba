"""A slot of the fake llama-server, and the file it is saved to: real in form, with a toy's KV.

A token's KV is its own number, in one row of K and one of V.
"""

import asyncio
import re
import struct
from dataclasses import dataclass, field
from pathlib import Path

MAGIC, VERSION = 0x67677371, 4
_F16, _ROW = 1, struct.Struct("<q")
_CELL = struct.Struct("<iIi")
_LAYER = struct.Struct("<iQ")


class ServerAborted(Exception):
    """A real server ends itself here: the file was cut short."""


class CannotRestore(Exception):
    """A real server answers 400 and has emptied the slot."""


@dataclass(slots=True)
class FakeSlot:
    """One sequence. `kv` is what was computed or read for its `ids`."""

    number: int
    ids: list[int] = field(default_factory=list)
    kv: list[int] = field(default_factory=list)
    restored: bool = False
    busy: asyncio.Lock = field(default_factory=asyncio.Lock)

    def fill(self, ids: list[int]) -> tuple[int, bool]:
        """Compute what is missing for a prompt; how much was there, and whether that was right."""
        cached = min(common(self.ids, ids), len(ids) - 1) if ids else 0
        right = self.kv[:cached] == ids[:cached]
        self.ids, self.restored = list(ids), False
        self.kv = self.kv[:cached] + ids[cached:]
        return cached, right

    def clear(self) -> None:
        """Forget everything."""
        self.ids, self.kv, self.restored = [], [], False

    def write(self, path: Path, streams: int) -> int:
        """Save it; returns the file's size in bytes."""
        count = len(self.ids)
        words = (-1, 1, count, *self.ids, 0)
        rows = b"".join(map(_ROW.pack, self.kv))
        cells = b"".join(_CELL.pack(position, 1, self.number) for position in range(count))
        cache = struct.pack("<I", count)
        if count:
            cache += cells + struct.pack("<IIII", 0, 1, 0, 0)
            cache += 2 * (_LAYER.pack(_F16, _ROW.size) + rows)
        head = struct.pack(f"<III{len(words)}i", MAGIC, VERSION, len(words), *words)
        data = head + struct.pack("<I", streams) + cache + bytes(4 * (streams - 1))
        path.write_bytes(data)
        return len(data)

    def read(self, path: Path, streams: int) -> int:
        """Restore it; returns how many bytes were read.

        As carelessly as a real server: a file that ends too early is the server's end, and what
        comes after the KV is not looked at. Raises CannotRestore and ServerAborted.
        """
        self.clear()
        try:
            data = path.read_bytes()
            magic, version, n_words = struct.unpack_from("<III", data)
            words = struct.unpack_from(f"<{n_words}i", data, 12)
        except (OSError, struct.error) as error:
            raise CannotRestore from error
        ids, at = list(words[3:-1]), 12 + 4 * n_words
        if (magic, version) != (MAGIC, VERSION):
            raise CannotRestore
        try:
            self.kv, at = _kv(data, at, streams)
        except struct.error as error:
            raise ServerAborted from error
        self.ids, self.restored = ids, True
        return at


def _kv(data: bytes, at: int, streams: int) -> tuple[list[int], int]:
    """The rows of K and where the KV ends. Raises CannotRestore, struct.error at an early end."""
    found, count = struct.unpack_from("<II", data, at)
    if found != streams:
        raise CannotRestore
    at += 8 + count * _CELL.size + 16
    kind, row_bytes = _LAYER.unpack_from(data, at)
    if (kind, row_bytes) != (_F16, _ROW.size):
        raise CannotRestore
    at += _LAYER.size
    rows = [_ROW.unpack_from(data, at + index * _ROW.size)[0] for index in range(count)]
    end = at + 2 * count * _ROW.size + _LAYER.size
    if end > len(data):
        raise struct.error
    return rows, end + 4 * (streams - 1)


def common(left: list[int], right: list[int]) -> int:
    """Length of the common prefix."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(left), len(right)))


def tokens_of(text: str) -> list[int]:
    """A toy's token ids: one for each word and mark, and one for the beginning."""
    return [1, *(2 + sum(word.encode()) * 31 % 30_000 for word in re.findall(r"\w+|\S", text))]
