"""Reads a GGUF file: metadata, dequantised tensors, and the config.json it implies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray

from workers.native.models.config import RopeSpec
from workers.native.models.errors import InvalidModelError, UnsupportedModelError
from workers.native.models.rope import inverse_frequencies

# general.architecture -> (architectures entry, model_type)
_ARCHITECTURES: Mapping[str, tuple[str, str]] = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
}
# llama.cpp knows these of Gemma 3 without the file saying so (LLM_ARCH_GEMMA3 in its sources).
_GEMMA3_SLIDING_PATTERN = 6
_GEMMA3_LOCAL_ROPE_BASE = 10_000.0
_GEMMA3_27B_LAYERS = 62
# Llama 3.1 and later: what the file's rope_freqs.weight was computed from, but for the factor.
_LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


class GgufFile:
    """One GGUF file, memory-mapped."""

    def __init__(self, path: Path) -> None:
        """Raises InvalidModelError when the file is no GGUF, UnsupportedModelError by name."""
        self.path = path
        try:
            self._reader = GGUFReader(str(path))
        except (ValueError, OSError, IndexError) as error:
            raise InvalidModelError(
                f"{path} is not a readable GGUF file ({error}); download it again"
            ) from error
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self.architecture = str(self.value("general.architecture", ""))
        if self.architecture not in _ARCHITECTURES:
            raise UnsupportedModelError(
                f"{path}: GGUF architecture {self.architecture!r} is not supported by the native "
                f"engine; supported: {', '.join(_ARCHITECTURES)}"
            )

    def value(self, key: str, default: Any = None) -> Any:
        """The metadata value of `key` as a Python value, or `default`."""
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def tensor_names(self) -> list[str]:
        """Names of the stored tensors, GGUF spelling."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape [out, in] of a stored tensor. KeyError if absent."""
        return tuple(int(n) for n in reversed(self._tensors[name].shape))

    def dequantised(self, name: str) -> NDArray[np.float32]:
        """The tensor as float32, in row-major [out, in] shape. KeyError if absent."""
        tensor = self._tensors[name]
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        return values.reshape(self.shape(name))

    def hf_config(self, dtype: torch.dtype) -> dict[str, Any]:
        """The config.json of this model, with weights stored as `dtype`.

        Written in the transformers 4 spelling, which transformers 5 and vLLM read too.
        """
        class_name, model_type = _ARCHITECTURES[self.architecture]
        if self._own("expert_count", 0):
            raise UnsupportedModelError(
                f"{self.path}: mixture-of-experts models are not supported by the native engine; "
                "use a dense model"
            )
        hidden, heads = self._need("embedding_length"), self._need("attention.head_count")
        config: dict[str, Any] = {
            "architectures": [class_name],
            "model_type": model_type,
            "torch_dtype": str(dtype).removeprefix("torch."),
            "vocab_size": int(self._tensors["token_embd.weight"].shape[1]),
            "hidden_size": hidden,
            "intermediate_size": self._need("feed_forward_length"),
            "num_hidden_layers": self._need("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._own("attention.head_count_kv", heads),
            "head_dim": self._own("attention.key_length", hidden // heads),
            "max_position_embeddings": self._need("context_length"),
            "rms_norm_eps": _shortest(self._need("attention.layer_norm_rms_epsilon")),
            "rope_theta": float(self._own("rope.freq_base", 10_000.0)),
            "rope_scaling": self._rope_scaling(),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "attention_dropout": 0.0,
            "use_cache": True,
        }
        for name in ("bos", "eos"):
            config[f"{name}_token_id"] = self.value(f"tokenizer.ggml.{name}_token_id")
        config["pad_token_id"] = self.value("tokenizer.ggml.padding_token_id")
        return config | self._family_config(hidden, heads)

    def _family_config(self, hidden: int, heads: int) -> dict[str, Any]:
        if self.architecture != "gemma3":
            bias = "blk.0.attn_q.bias" in self._tensors
            config: dict[str, Any] = {"hidden_act": "silu"}
            return config if self.architecture == "qwen2" else config | {"attention_bias": bias}
        layers = self._need("block_count")
        large = layers == _GEMMA3_27B_LAYERS
        pattern = _GEMMA3_SLIDING_PATTERN
        return {
            "hidden_activation": "gelu_pytorch_tanh",
            "attention_bias": False,
            "query_pre_attn_scalar": (
                hidden // heads if large else self._own("attention.key_length", 256)
            ),
            "rope_local_base_freq": _GEMMA3_LOCAL_ROPE_BASE,
            "sliding_window": self._need("attention.sliding_window"),
            "sliding_window_pattern": pattern,
            "layer_types": [
                "sliding_attention" if (layer + 1) % pattern else "full_attention"
                for layer in range(layers)
            ],
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        }

    def _rope_scaling(self) -> dict[str, Any] | None:
        if "rope_freqs.weight" in self._tensors:
            return self._llama3_scaling()
        kind = self._own("rope.scaling.type", "none")
        if kind == "none":
            return None
        if kind == "linear":
            return {"rope_type": "linear", "factor": float(self._need("rope.scaling.factor"))}
        raise UnsupportedModelError(
            f"{self.path}: rope scaling {kind!r} is not supported by the native engine; "
            "supported: none, linear, llama3"
        )

    def _llama3_scaling(self) -> dict[str, Any]:
        """The file holds only the per-frequency divisors; find the parameters that give them."""
        stored = torch.from_numpy(self.dequantised("rope_freqs.weight").copy())
        theta, factor = float(self._own("rope.freq_base", 10_000.0)), float(stored.max())
        plain = inverse_frequencies(RopeSpec(theta), 2 * stored.numel())
        scaled = inverse_frequencies(RopeSpec(theta, "llama3", factor=factor), 2 * stored.numel())
        if not torch.allclose(plain / scaled, stored, rtol=1e-4):
            raise UnsupportedModelError(
                f"{self.path}: its rope_freqs.weight is not Llama 3.1's scaling, the only one the "
                "native engine knows; use the model's safetensors folder"
            )
        return {"rope_type": "llama3", "factor": factor, **_LLAMA3_ROPE}

    def _own(self, key: str, default: Any) -> Any:
        return self.value(f"{self.architecture}.{key}", default)

    def _need(self, key: str) -> Any:
        value = self._own(key, None)
        if value is None:
            raise InvalidModelError(
                f"{self.path} lacks {self.architecture}.{key}; download a complete GGUF file"
            )
        return value


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 9.999999747378752e-06 is meant as 1e-05."""
    return float(str(np.float32(value)))
