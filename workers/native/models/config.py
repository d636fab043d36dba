"""What a decoder model is made of: the ModelConfig that weights and KV cache share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RopeType = Literal["default", "linear", "llama3"]
Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """One rotary embedding: base and frequency scaling.

    `linear` divides every frequency by `factor`. `llama3` is the smoothed scaling of Llama 3.1
    (transformers `_compute_llama3_parameters`) and reads the last three fields.
    """

    theta: float
    kind: RopeType = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_tokens: int = 8192


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape and rules of one decoder model.

    `windows[i]` is layer i's sliding window in tokens (a query at position p sees positions
    p-window+1 .. p), or None for full attention. Layers with a window use `local_rope` where the
    model has one, all others use `rope`.
    """

    architecture: str
    vocab_size: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    norm_eps: float
    rope: RopeSpec
    windows: tuple[int | None, ...]
    max_context_tokens: int
    attention_scale: float
    activation: Activation
    tie_embeddings: bool
    eos_ids: tuple[int, ...]
    bos_id: int | None = None
    local_rope: RopeSpec | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sandwich_norms: bool = False
    norm_weight_offset: float = 0.0
    embedding_scale: float = 1.0

    def rope_of(self, layer: int) -> RopeSpec:
        """The rotary embedding that layer `layer` uses."""
        if self.local_rope is not None and self.windows[layer] is not None:
            return self.local_rope
        return self.rope

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of float32 K and V that one token takes over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 4

    @property
    def layer_parameters(self) -> int:
        """Number of weights in one layer's matrices (biases and norms left out)."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def matrix_parameters(self) -> int:
        """Number of weights that one decode step reads: all layers and the output head."""
        return self.layers * self.layer_parameters + self.hidden * self.vocab_size
