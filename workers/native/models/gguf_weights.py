"""A GGUF file's tensors under their Hugging Face names and conventions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.native.models.errors import InvalidModelError
from workers.native.models.gguf_file import GgufFile

_GLOBAL: Mapping[str, str] = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Gemma surrounds both branches with norms, so the same GGUF name means another Hugging Face norm.
_GEMMA_LAYER: Mapping[str, str] = {
    **_LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
# Tensors that are not weights: llama.cpp's rope divisors (see GgufFile.hf_config).
_IGNORED = frozenset({"rope_freqs.weight"})


class GgufWeights:
    """Dequantised float32 weights by Hugging Face name (a WeightSource).

    Undoes two conventions of GGUF: the Llama converter interleaves the rotary halves of Q and K
    (`permute` in llama.cpp's convert_hf_to_gguf.py), and Gemma's norms are stored with 1 added.
    """

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._gemma = file.architecture == "gemma3"
        self._stored = {
            self._hf_name(name): name for name in file.tensor_names() if name not in _IGNORED
        }

    def names(self) -> Iterable[str]:
        """Hugging Face names of all weights."""
        return self._stored.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        """The named weight's shape. Raises InvalidModelError if absent."""
        return self._file.shape(self._find(name))

    def tensor(self, name: str) -> Tensor:
        """The named weight, float32. Raises InvalidModelError if absent."""
        values = self._file.dequantised(self._find(name))
        if self._file.architecture == "llama" and "self_attn." in name:
            values = self._unpermuted(name, values)
        if self._gemma and name.endswith("norm.weight"):
            values = values - np.float32(1)
        return torch.from_numpy(np.array(values, dtype=np.float32, order="C"))

    def _find(self, name: str) -> str:
        if name not in self._stored:
            raise InvalidModelError(
                f"weight {name!r} is missing in {self._file.path}; download a complete GGUF file"
            )
        return self._stored[name]

    def _unpermuted(self, name: str, values: NDArray[np.float32]) -> NDArray[np.float32]:
        if "q_proj" in name:
            heads = int(self._file.value("llama.attention.head_count"))
        elif "k_proj" in name:
            heads = int(
                self._file.value("llama.attention.head_count_kv")
                or self._file.value("llama.attention.head_count")
            )
        else:
            return values
        half = values.shape[0] // heads // 2
        pairs = values.reshape(heads, half, 2, *values.shape[1:])
        return pairs.swapaxes(1, 2).reshape(values.shape)

    def _hf_name(self, name: str) -> str:
        if name in _GLOBAL:
            return _GLOBAL[name]
        names = _GEMMA_LAYER if self._gemma else _LAYER
        match = _BLOCK.fullmatch(name)
        if match is None or match[2] not in names:
            raise InvalidModelError(
                f"{self._file.path} holds a tensor {name!r} that the {self._file.architecture} "
                "architecture does not have; use another GGUF file"
            )
        return f"model.layers.{match[1]}.{names[match[2]]}.{match[3]}"
