"""vLLM's KV of a prompt, rewritten as a slot file that llama.cpp restores.

After rotary embedding K and V are plain vectors per token and head in both engines. llama.cpp's
`llama` architecture keeps the two halves of a rotated pair next to each other (its weights are
permuted when they are converted), vLLM keeps them half a head apart: K is permuted here, V is not.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from workers.courier.errors import CannotConvert
from workers.courier.example_folder import folder_of, layer_files, read_layer, stored_tokens
from workers.courier.slot_file import FloatArray, KvType, write_slot

# Of the largest number: the rounding of bfloat16, and what another order of sums adds to it.
_SAME = 0.02
log = logging.getLogger("splitserve.courier")
_HF_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")


@dataclass(frozen=True, slots=True)
class ModelLayout:
    """The shape of a model's KV, and the type in which the decode worker keeps it."""

    layers: int
    kv_heads: int
    head_dim: int
    kv_type: KvType = KvType.F16

    @property
    def row_values(self) -> tuple[int, ...]:
        """Numbers in a row of K, and of V, per layer."""
        return (self.kv_heads * self.head_dim,) * self.layers


@dataclass(frozen=True, slots=True)
class Converted:
    """A slot file was written: how many tokens it holds, and its size."""

    tokens: int
    size_bytes: int


def convert(
    folder: Path,
    token_ids: Sequence[int],
    out: Path,
    model: ModelLayout,
    block_tokens: int,
    *,
    prompt_tokens: int | None = None,
) -> Converted:
    """Write to `out` the KV of a prompt's ids, all but the last, which decode evaluates itself.

    `token_ids` are those the prefill worker was sent, `folder` is its shared_storage_path. The
    first `prompt_tokens` of them are the prompt and the others filler of this hand-off's own: then
    nobody else can look for its KV, and it is deleted once converted. Without filler (None) decode
    gets fewer tokens: whole blocks only, and not the last one stored.
    Raises KvMissing, CannotConvert or OSError; no file is left then.
    """
    prompt = len(token_ids) if prompt_tokens is None else prompt_tokens
    computed = token_ids[: max(0, stored_tokens(len(token_ids), block_tokens) - block_tokens)]
    keep = min(prompt - 1, len(computed))
    if keep <= 0:
        raise CannotConvert(
            f"of {prompt} prompt tokens in blocks of {block_tokens} none can be handed over; "
            "serve so short a prompt whole"
        )
    source = folder_of(folder, token_ids, block_tokens)
    files = layer_files(source, model.layers)
    written_bytes = write_slot(
        out,
        token_ids[:keep],
        _rows(files, computed, keep, model, block_tokens),
        row_values=model.row_values,
        kv_type=model.kv_type,
    )
    if prompt < len(token_ids):
        try:
            shutil.rmtree(source)
        except OSError as error:
            log.warning("%s was converted and cannot be deleted: %s; delete it", source, error)
    return Converted(keep, written_bytes)


def _rows(
    files: Sequence[Path], computed: Sequence[int], keep: int, model: ModelLayout, block_tokens: int
) -> Iterator[tuple[FloatArray, FloatArray]]:
    for number, path in enumerate(files):
        keys, values = read_layer(
            path,
            kv_heads=model.kv_heads,
            head_dim=model.head_dim,
            block_tokens=block_tokens,
            keep_tokens=len(computed),
        )
        if number == 0:
            require_like_rows(computed, keys, values)
        yield interleaved(keys[:keep]).reshape(keep, -1), values[:keep].reshape(keep, -1)


def require_like_rows(token_ids: Sequence[int], keys: FloatArray, values: FloatArray) -> None:
    """Raise CannotConvert unless the first layer's K and V were read as they were meant.

    Which layout an engine has chosen for its processor no file tells, and KV read in another one
    would give a fluent, wrong answer. But nothing of a token's place is in the first layer yet,
    save the rotation of K: where an id comes twice V must be the same, and so must the length of
    each pair of numbers in K that is rotated.
    """
    most, count = Counter(token_ids).most_common(1)[0]
    if count < 2:
        raise CannotConvert(
            "no id comes twice among those prefilled, so the layout of their KV cannot be checked; "
            "serve so short a prompt whole"
        )
    places = [place for place, each in enumerate(token_ids) if each == most]
    first, second = np.split(keys[places], 2, axis=2)
    for rows in (values[places], np.hypot(first, second)):
        if not np.abs(rows - rows[0]).max() <= _SAME * np.abs(rows[0]).max():
            raise CannotConvert(
                "this vLLM lays its KV out in another way than on x86 without AMX; start it with "
                "--dtype float32 on a processor with AMX, and not on ARM or a GPU"
            )


def interleaved(keys: FloatArray) -> FloatArray:
    """Move rotated pairs from half a head apart to next to each other; [tokens, heads, dim]."""
    n_tokens, heads, head_dim = keys.shape
    return keys.reshape(n_tokens, heads, 2, head_dim // 2).swapaxes(2, 3).reshape(keys.shape)


def layout_of_config(path: Path, kv_type: KvType = KvType.F16) -> ModelLayout:
    """Read a Hugging Face config.json. Raises CannotConvert for other models, by name; OSError."""
    try:
        config: dict[str, Any] = json.loads(path.read_bytes())
        (architecture,) = config["architectures"]
        if architecture not in _HF_ARCHITECTURES:
            raise _refusal(path, f"architecture {architecture}")
        if config.get("sliding_window") is not None:
            raise _refusal(path, "a sliding window")
        heads = config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or heads
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        return ModelLayout(config["num_hidden_layers"], kv_heads, head_dim, kv_type)
    except (ValueError, KeyError, TypeError) as error:
        raise CannotConvert(
            f"{path} describes no model: {error!r}; name its config.json"
        ) from error


def layout_of_gguf(path: Path, kv_type: KvType = KvType.F16) -> ModelLayout:
    """Read a GGUF file's metadata. Raises CannotConvert for other models, by name; OSError."""
    from gguf import GGUFReader  # noqa: PLC0415 - slow to import, and only needed once

    try:
        reader = GGUFReader(str(path))
    except (ValueError, IndexError) as error:
        raise CannotConvert(
            f"{path} is no GGUF file ({error}); name the decode worker's"
        ) from error

    def value(key: str, default: Any = None) -> Any:
        field = reader.get_field(key)
        return default if field is None else field.contents()

    architecture = value("general.architecture")
    if architecture != "llama":
        raise _refusal(path, f"architecture {architecture}")
    heads = value("llama.attention.head_count")
    head_dim = value("llama.attention.key_length", value("llama.embedding_length") // heads)
    kv_heads = value("llama.attention.head_count_kv", heads)
    if value("llama.attention.value_length", head_dim) != head_dim:
        raise _refusal(path, "K and V of different width")
    if value("llama.rope.dimension_count", head_dim) != head_dim:
        raise _refusal(path, "rotary embedding of a part of each head")
    if not isinstance(kv_heads, int):
        raise _refusal(path, "KV heads that differ between layers")
    return ModelLayout(value("llama.block_count"), kv_heads, head_dim, kv_type)


def _refusal(path: Path, what: str) -> CannotConvert:
    return CannotConvert(
        f"{path}: KV of a model with {what} cannot be converted, only that of "
        f"{' and '.join(_HF_ARCHITECTURES)} (llama.cpp: llama); use one engine on both sides"
    )
