"""The head of a slot file: what is taken for true, and that nothing in a file can do harm."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.courier.errors import BadSlotFile
from workers.courier.slot_file import KvType, write_slot
from workers.courier.slot_head import SlotLayout, check_head, read_layout, tokens_digest
from workers.courier.testing.slot_files import slot_file

TOKENS = [5, 6, 7, 40_000]


def saved(folder: Path, content: bytes) -> Path:
    path = folder / "splitserve-x.slot"
    path.write_bytes(content)
    return path


def check(path: Path, tokens: list[int], size_bytes: int | None = None) -> None:
    size = path.stat().st_size if size_bytes is None else size_bytes
    check_head(path, size, len(tokens), tokens_digest(tokens))


def test_a_file_as_it_should_be(tmp_path: Path) -> None:
    check(saved(tmp_path, slot_file(TOKENS)), TOKENS)


@pytest.mark.parametrize("other", [[5, 6, 7], [5, 6, 7, 40_001], [6, 5, 7, 40_000], []])
def test_other_tokens_are_refused(tmp_path: Path, other: list[int]) -> None:
    with pytest.raises(BadSlotFile, match="other tokens"):
        check(saved(tmp_path, slot_file(TOKENS)), other)


def test_another_size_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, slot_file(TOKENS))
    with pytest.raises(BadSlotFile, match="bytes, not 7"):
        check(path, TOKENS, 7)


@pytest.mark.parametrize(
    "content,cause",
    [
        (b"", "within its head"),
        (b"qsgg", "within its head"),
        (b"GGUF" + bytes(100), "magic"),
        (struct.pack("<III", 0x67677371, 3, 4) + bytes(100), "version 3"),
        (struct.pack("<III", 0x67677371, 4, 0), "token list"),
        (struct.pack("<III", 0x67677371, 4, 2**32 - 1) + bytes(100), "within its tokens"),
        (struct.pack("<III4i", 0x67677371, 4, 4, -1, 1, 3, 0), "token list"),
        (struct.pack("<III4i", 0x67677371, 4, 4, -1, 2, 0, 0), "token list"),
        (struct.pack("<III4i", 0x67677371, 4, 4, -1, 1, 0, 1), "more than text"),
    ],
)
def test_broken_heads_are_refused(tmp_path: Path, content: bytes, cause: str) -> None:
    with pytest.raises(BadSlotFile, match=cause):
        check(saved(tmp_path, content), [])


def test_the_layout_of_one_stream(tmp_path: Path) -> None:
    layout = read_layout(saved(tmp_path, slot_file(TOKENS)))
    assert layout == SlotLayout("f16/f16", "rows", 1, "2x8/8", 2 * 2 * 8 + 16)


def test_streams_that_are_not_shared(tmp_path: Path) -> None:
    layout = read_layout(saved(tmp_path, slot_file(TOKENS, streams=4)))
    assert layout is not None
    assert layout.streams == 4


@pytest.mark.parametrize("kind", KvType)
def test_what_the_converter_writes_is_understood(tmp_path: Path, kind: KvType) -> None:
    path = tmp_path / "x"
    rows = np.ones((3, 8), np.float32)
    size_bytes = write_slot(path, [1, 2, 3], [(rows, rows)] * 2, row_values=(8, 8), kv_type=kind)
    check(path, [1, 2, 3], size_bytes)
    layout = read_layout(path)
    row = 8 * kind.value_bytes
    name = kind.name.lower()
    assert layout == SlotLayout(f"{name}/{name}", "rows", 1, f"2x{row}/{row}", 4 * row + 16)


def with_caches(*caches: bytes) -> bytes:
    """A file with one token and these caches."""
    return slot_file([9])[: 12 + 5 * 4] + b"".join(caches)


CELL = struct.pack("<II", 1, 1) + struct.pack("<iIi", 0, 1, 0)
ROWS = struct.pack("<IIII", 0, 1, 0, 0) + 2 * (struct.pack("<iQ", 8, 34) + bytes(34))
COLUMNS = (
    struct.pack("<IIII", 1, 1, 0, 0)
    + struct.pack("<iQ", 1, 4)
    + bytes(4)
    + struct.pack("<iII", 1, 2, 2)
    + bytes(4)
)


def test_quantised_and_transposed_caches(tmp_path: Path) -> None:
    layout = read_layout(saved(tmp_path, with_caches(CELL, ROWS)))
    assert layout == SlotLayout("q8_0/q8_0", "rows", 1, "1x34/34", 68 + 16)
    layout = read_layout(saved(tmp_path, with_caches(CELL, COLUMNS)))
    assert layout == SlotLayout("f16/f16", "columns", 1, "1x4/4", 8 + 16)


def test_two_caches_in_a_row(tmp_path: Path) -> None:
    layout = read_layout(saved(tmp_path, with_caches(CELL, ROWS, CELL, COLUMNS)))
    assert layout is not None
    assert layout.kv == "q8_0/q8_0+f16/f16"
    assert layout.v_order == "rows+columns"
    assert layout.shape == "1x34/34+1x4/4"


@pytest.mark.parametrize(
    "rest",
    [
        b"",
        bytes(3),
        bytes(4),
        struct.pack("<I", 1025),
        struct.pack("<II", 1, 2**32 - 1),
        CELL + struct.pack("<IIII", 2, 1, 0, 0),
        CELL + struct.pack("<IIII", 0, 2**32 - 1, 0, 0),
        CELL + struct.pack("<IIII", 0, 1, 0, 0) + struct.pack("<iQ", 1, 2**64 - 1),
        CELL + ROWS[:-1],
        CELL + ROWS + b"recurrent state",
    ],
)
def test_what_is_not_understood_has_no_layout(tmp_path: Path, rest: bytes) -> None:
    assert read_layout(saved(tmp_path, with_caches(rest))) is None


@settings(max_examples=300)
@given(at=st.integers(0, 400), value=st.integers(0, 255), cut=st.integers(0, 400))
def test_no_damage_does_more_than_be_refused(
    tmp_path_factory: pytest.TempPathFactory, at: int, value: int, cut: int
) -> None:
    content = bytearray(slot_file(TOKENS))
    content[at % len(content)] = value
    path = saved(tmp_path_factory.getbasetemp(), bytes(content[: len(content) - cut]))
    try:
        check(path, TOKENS)
        read_layout(path)
    except BadSlotFile:
        pass
