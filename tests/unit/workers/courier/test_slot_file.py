"""llama.cpp's slot file: written, read back, and refused when anything in it is wrong."""

import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from workers.courier.errors import BadSlotFile, CannotConvert
from workers.courier.slot_file import (
    FloatArray,
    KvType,
    bf16_to_float32,
    float32_to_bf16,
    read_slot,
    size_bytes,
    write_slot,
)

PER_EXAMPLE = settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40
)


def numbers(seed: int, n_tokens: int, row: int, kind: KvType) -> FloatArray:
    """Random values that `kind` holds exactly."""
    wide = np.random.default_rng(seed).standard_normal((n_tokens, row)).astype(np.float32)
    if kind is KvType.F16:
        return wide.astype(np.float16).astype(np.float32)
    return bf16_to_float32(float32_to_bf16(wide)) if kind is KvType.BF16 else wide


def write(path: Path, *, n_tokens: int = 3, rows: tuple[int, ...] = (4, 8), seed: int = 0) -> None:
    layers = [
        (
            numbers(seed + i, n_tokens, r, KvType.F16),
            numbers(~(seed + i) & 0xFF, n_tokens, r, KvType.F16),
        )
        for i, r in enumerate(rows)
    ]
    write_slot(path, range(n_tokens), layers, row_values=rows, kv_type=KvType.F16)


@PER_EXAMPLE
@given(
    token_ids=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20),
    rows=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    kind=st.sampled_from(KvType),
    seed=st.integers(0, 1000),
)
def test_what_is_written_is_read_back(
    tmp_path: Path, token_ids: list[int], rows: list[int], kind: KvType, seed: int
) -> None:
    layers = [
        (
            numbers(seed + 2 * i, len(token_ids), row, kind),
            numbers(seed + 2 * i + 1, len(token_ids), row, kind),
        )
        for i, row in enumerate(rows)
    ]
    path = tmp_path / "slot"
    written = write_slot(path, token_ids, iter(layers), row_values=rows, kv_type=kind)
    assert written == path.stat().st_size == size_bytes(len(token_ids), rows, kind)
    slot = read_slot(path)
    assert slot.token_ids == tuple(token_ids)
    assert slot.kv_type is kind
    for (keys, values), read_keys, read_values in zip(layers, slot.keys, slot.values, strict=True):
        np.testing.assert_array_equal(keys, read_keys)
        np.testing.assert_array_equal(values, read_values)


def test_the_size_is_what_llama_cpp_reported() -> None:
    # SmolLM2-135M, saved by llama-server: n_saved 10, n_written 231332.
    assert size_bytes(10, (192,) * 30, KvType.F16) == 231332


def test_the_bytes_are_those_llama_cpp_writes(tmp_path: Path) -> None:
    path = tmp_path / "slot"
    keys, values = np.array([[[1.0, 2.0]], [[-1.0, 0.5]]], np.float32)
    write_slot(path, [7], [(keys, values)], row_values=(2,), kv_type=KvType.F16)
    assert path.read_bytes() == b"".join(
        (
            b"qsgg" + struct.pack("<II", 4, 5),
            struct.pack("<5i", -1, 1, 1, 7, 0),
            struct.pack("<II", 1, 1) + struct.pack("<iii", 0, 1, 0),
            struct.pack("<IIII", 0, 1, 0, 0),
            struct.pack("<iQ", 1, 4) + bytes.fromhex("003c0040"),
            struct.pack("<iQ", 1, 4) + bytes.fromhex("00bc0038"),
        )
    )


@PER_EXAMPLE
@given(share=st.floats(0, 1, exclude_max=True))
def test_a_file_cut_short_is_refused(tmp_path: Path, share: float) -> None:
    path = tmp_path / "slot"
    write(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(BadSlotFile, match=r"slot file slot cannot be used: .*; save it again"):
        read_slot(path)


@PER_EXAMPLE
@given(at=st.integers(0, 127), value=st.binary(min_size=4, max_size=4))
def test_no_damage_does_worse_than_a_refusal(tmp_path: Path, at: int, value: bytes) -> None:
    path = tmp_path / "slot"
    write(path)
    data = bytearray(path.read_bytes())
    data[at : at + 4] = value
    path.write_bytes(data)
    try:
        slot = read_slot(path)
    except BadSlotFile:
        return
    assert len(slot.token_ids) == 3


@pytest.mark.parametrize(
    "at,value,cause",
    [
        (0, 0x12345678, "magic 0x12345678"),
        (4, 5, "version 5"),
        (8, 2**31, "it ends at byte"),
        (12, 0, "its token list"),
        (20, 2, "its token list"),
        (36, 1, "its token list"),
        (40, 2, "2 streams"),
        (44, 4, "4 cells for 3 tokens"),
        (48, 9, "its positions"),
        (52, 2, "its positions"),
        (84, 1, "V is transposed"),
        (88, 0, "bytes follow its end"),
        (88, 1, "bytes follow its end"),
        (88, 2**32 - 1, "it ends at byte"),
        (100, 8, "ggml type 8"),
        (104, 7, "a row of 7 bytes"),
        (108, 1, "it ends at byte"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, at: int, value: int, cause: str) -> None:
    path = tmp_path / "slot"
    write(path)
    data = bytearray(path.read_bytes())
    data[at : at + 4] = struct.pack("<I", value)
    path.write_bytes(data)
    with pytest.raises(BadSlotFile, match=cause):
        read_slot(path)


def test_bytes_after_the_end_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "slot"
    write(path)
    path.write_bytes(path.read_bytes() + bytes(64))
    with pytest.raises(BadSlotFile, match="64 bytes follow its end"):
        read_slot(path)


def test_a_value_that_f16_cannot_hold_is_refused_and_no_file_is_left(tmp_path: Path) -> None:
    path = tmp_path / "slot"
    rows = np.full((1, 2), 1e5, np.float32)
    with pytest.raises(CannotConvert, match="-ctk f32 -ctv f32"):
        write_slot(path, [1], [(rows, rows)], row_values=(2,), kv_type=KvType.F16)
    assert not path.exists()
    write_slot(path, [1], [(rows, rows)], row_values=(2,), kv_type=KvType.F32)
    assert read_slot(path).keys[0].tolist() == [[1e5, 1e5]]


def test_a_source_that_fails_leaves_no_file(tmp_path: Path) -> None:
    def layers() -> Iterator[tuple[FloatArray, FloatArray]]:
        yield np.zeros((1, 2), np.float32), np.zeros((1, 2), np.float32)
        raise OSError("the disk went away")

    with pytest.raises(OSError, match="went away"):
        write_slot(tmp_path / "slot", [1], layers(), row_values=(2, 2), kv_type=KvType.F16)
    assert list(tmp_path.iterdir()) == []


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_bfloat16_is_rounded_to_the_nearest(number: float) -> None:
    bits = float32_to_bf16(np.array([number], np.float32))
    (near,) = bf16_to_float32(bits).tolist()
    if np.isinf(near):
        return  # beyond the largest bfloat16
    for other in (bits - np.uint16(1), bits + np.uint16(1)):
        (far,) = bf16_to_float32(other).tolist()
        if np.isfinite(far):
            assert abs(near - number) <= abs(far - number)
