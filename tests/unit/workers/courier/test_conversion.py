"""The courier's conversions: which folder and which model, and what is left behind."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from router.backends.vllm_filler import with_filler
from workers.courier.conversion import Converter
from workers.courier.errors import CannotConvert, FolderFull, KvMissing
from workers.courier.example_folder import folder_of, stored_tokens
from workers.courier.slot_file import read_slot
from workers.courier.store import Store
from workers.courier.wire import ConvertWish

NAME = f"splitserve-{'0' * 32}.slot"
PROMPT = [5, 6, 7, 8, 9]
SENT = with_filler(PROMPT, 4, 0, "a mark")


def model_file(folder: Path, architecture: str = "llama") -> Path:
    path = folder / "model.gguf"
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_embedding_length(4)
    writer.add_head_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def save_kv(shared: Path) -> Path:
    """KV of one layer and head of 4 numbers, all of them 1, as vLLM would leave it."""
    numbers = np.ones((stored_tokens(len(SENT), 4), 1, 8), np.float32)
    entry = {"dtype": "F32", "shape": numbers.shape, "data_offsets": [0, numbers.nbytes]}
    header = json.dumps({"kv_cache": entry}).encode()
    folder = folder_of(shared, SENT, 4)
    folder.mkdir(parents=True)
    path = folder / "model.layers.0.self_attn.attn.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + numbers.tobytes())
    return folder


def converter(tmp_path: Path, *, max_bytes: int = 1 << 20) -> Converter:
    for name in ("slots", "shared"):
        (tmp_path / name).mkdir()
    store = Store(tmp_path / "slots", max_bytes, 300.0)
    return Converter(store, tmp_path / "shared", model_file(tmp_path))


def wish(folder: Path) -> ConvertWish:
    return ConvertWish(
        name=NAME, folder=str(folder), token_ids=SENT, block_tokens=4, prompt_tokens=len(PROMPT)
    )


async def test_a_file_is_made_under_its_name(tmp_path: Path) -> None:
    subject = converter(tmp_path)
    folder = save_kv(tmp_path / "shared")
    made = await subject.convert(wish(tmp_path / "shared"))
    path = tmp_path / "slots" / NAME
    assert (made.tokens, made.size_bytes) == (len(PROMPT) - 1, path.stat().st_size)
    assert read_slot(path).token_ids == tuple(PROMPT[:-1])
    assert not folder.exists()


async def test_another_folder_is_refused(tmp_path: Path) -> None:
    subject = converter(tmp_path)
    for folder in (tmp_path, tmp_path / "shared" / ".." / "slots", Path("/")):
        with pytest.raises(CannotConvert, match="is not within this courier's --examples"):
            await subject.convert(wish(folder))


@pytest.mark.parametrize("there,max_bytes", [(False, 1 << 20), (True, 64)])
async def test_a_failure_leaves_no_file(tmp_path: Path, there: bool, max_bytes: int) -> None:
    subject = converter(tmp_path, max_bytes=max_bytes)
    if there:
        save_kv(tmp_path / "shared")
    with pytest.raises(FolderFull if there else KvMissing):
        await subject.convert(wish(tmp_path / "shared"))
    assert list((tmp_path / "slots").glob("splitserve-*")) == []


def test_another_model_is_refused_before_anything_is_asked_of_it(tmp_path: Path) -> None:
    subject = converter(tmp_path)
    subject.prepare()
    model_file(tmp_path, "qwen3")
    with pytest.raises(CannotConvert, match="architecture qwen3 cannot be converted"):
        Converter(Store(tmp_path / "slots", 1, 1.0), tmp_path, tmp_path / "model.gguf").prepare()


async def test_a_courier_that_was_told_of_no_folder_converts_nothing(tmp_path: Path) -> None:
    subject = Converter(Store(tmp_path, 1 << 20, 300.0), None, None)
    assert not subject.ready
    subject.prepare()
    with pytest.raises(CannotConvert, match="--examples"):
        await subject.convert(wish(tmp_path))
