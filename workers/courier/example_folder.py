"""What vLLM's ExampleConnector leaves in its shared folder, read without vLLM.

A prompt's KV lies in `<shared folder>/<key>/<layer>.safetensors`. The key is the MD5 of the
prompt's token ids (int64) cut to whole blocks, and only whole blocks are stored: of n ids
`(n - 1) // block_tokens * block_tokens`. A file holds one tensor `kv_cache`,
[n_tokens, kv_heads, 2 * head_dim], which on a CPU is not what its shape says: of each block and KV
head the memory is K as [head_dim, block_tokens], then V as [block_tokens, head_dim].

A prompt that the engine prefilled in several steps is stored after the first one: the file ends
with the last block of that step, and of this block any part may not be computed. So a reader takes
all stored blocks but the last. Whoever wants the KV of a whole prompt sends more: attention is
causal, so ids after the prompt change nothing in it.

Source: vLLM 0.32, distributed/kv_transfer/kv_connector/v1/example_connector.py and
csrc/cpu/cpu_attn_vec.hpp (x86 with AVX2 or AVX-512; with AMX, on ARM and on GPUs it is another).
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workers.courier.errors import CannotConvert, KvMissing
from workers.courier.slot_file import FloatArray, bf16_to_float32

_TENSOR = "kv_cache"
_LAYER_NUMBER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_HEADER_LIMIT_BYTES = 1 << 20
# How safetensors names a dtype, and what its bytes are read as.
_DTYPES: Mapping[str, str] = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def stored_tokens(prompt_tokens: int, block_tokens: int) -> int:
    """Return how many of a prompt's tokens the connector stores."""
    return max(prompt_tokens - 1, 0) // block_tokens * block_tokens


def folder_of(shared: Path, token_ids: Sequence[int], block_tokens: int) -> Path:
    """Return the folder of the prompt that was sent, whether or not it is there."""
    cut = token_ids[: stored_tokens(len(token_ids), block_tokens)]
    key = np.asarray(cut, "<i8").tobytes()
    return shared / hashlib.md5(key, usedforsecurity=False).hexdigest()


def layer_files(folder: Path, layers: int) -> list[Path]:
    """Return the files of a prompt's layers, in order. Raises KvMissing unless all are there."""
    if not folder.is_dir():
        raise KvMissing(
            f"no KV of this prompt in {folder.parent}; is it the prefill worker's "
            "shared_storage_path, and its block size what the router was told?"
        )
    numbered = {
        int(found[1]): path
        for path in folder.glob("*.safetensors")
        if (found := _LAYER_NUMBER.search(path.name))
    }
    if sorted(numbered) != list(range(layers)):
        raise KvMissing(
            f"{folder} holds {len(numbered)} layers and the model has {layers}; "
            "serve the same model on both sides, and give each model a folder of its own"
        )
    return [numbered[number] for number in range(layers)]


def read_layer(
    path: Path, *, kv_heads: int, head_dim: int, block_tokens: int, keep_tokens: int
) -> tuple[FloatArray, FloatArray]:
    """Return the first `keep_tokens` tokens' K and V, each float32 [tokens, kv_heads, head_dim].

    The file must hold a block more than that, see above. Raises KvMissing when it does not, and
    CannotConvert when it is damaged or of another shape than the model's.
    """
    raw, shape = _read_tensor(path)
    n_tokens = shape[0] if shape else 0
    if shape != [n_tokens, kv_heads, 2 * head_dim] or n_tokens % block_tokens:
        raise CannotConvert(
            f"{path.name} holds {shape}, not whole blocks of {block_tokens} tokens of "
            f"{kv_heads} KV heads with 2 x {head_dim} values; serve the same model on both sides"
        )
    if n_tokens < keep_tokens + block_tokens:
        raise KvMissing(
            f"{path.parent} holds {n_tokens} tokens and {keep_tokens + block_tokens} are needed: "
            "the prompt was prefilled in steps; start vLLM with more --max-num-batched-tokens"
        )
    blocks = -(-keep_tokens // block_tokens)
    by_token = raw[: blocks * block_tokens * kv_heads * 2 * head_dim]
    # Back to the memory of a block and head: the connector gathered it as if it were rows.
    by_head = by_token.reshape(blocks, block_tokens, kv_heads, 2 * head_dim).swapaxes(1, 2)
    memory = by_head.reshape(blocks, kv_heads, 2, head_dim * block_tokens)
    keys = memory[:, :, 0].reshape(blocks, kv_heads, head_dim, block_tokens).transpose(0, 3, 1, 2)
    values = memory[:, :, 1].reshape(blocks, kv_heads, block_tokens, head_dim).swapaxes(1, 2)
    flat = (blocks * block_tokens, kv_heads, head_dim)
    return (
        _as_float32(keys.reshape(flat)[:keep_tokens]),
        _as_float32(values.reshape(flat)[:keep_tokens]),
    )


def _as_float32(numbers: NDArray[Any]) -> FloatArray:
    if numbers.dtype == np.uint16:
        return bf16_to_float32(np.ascontiguousarray(numbers))
    return np.ascontiguousarray(numbers, np.float32)


def _read_tensor(path: Path) -> tuple[NDArray[Any], list[int]]:
    """Read `kv_cache`, flat (bfloat16 as its bits), and its shape.

    Read by hand because numpy has no bfloat16, and a header of some lines needs no torch.
    """
    try:
        with path.open("rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            if header_bytes > _HEADER_LIMIT_BYTES:
                raise ValueError(f"a header of {header_bytes} bytes")
            entry = json.loads(file.read(header_bytes))[_TENSOR]
            start, end = entry["data_offsets"]
            shape = [int(each) for each in entry["shape"]]
            if entry["dtype"] not in _DTYPES:
                raise CannotConvert(
                    f"{path.name} holds {entry['dtype']} and only {', '.join(_DTYPES)} can be "
                    "converted; start the prefill worker with --kv-cache-dtype auto"
                )
            dtype = np.dtype(_DTYPES[entry["dtype"]])
            file.seek(8 + header_bytes + start)
            data = file.read(end - start)
        if len(data) != int(np.prod(shape, dtype=np.int64)) * dtype.itemsize:
            raise ValueError(f"{len(data)} bytes of data for the shape {shape}")
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise CannotConvert(f"{path.name} is no whole safetensors file: {error}") from error
    except FileNotFoundError as error:
        raise KvMissing(f"{path.name} was deleted while it was read") from error
    return np.frombuffer(data, dtype), shape
