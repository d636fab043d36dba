"""One decoder layer: attention and gated MLP, each inside a residual connection."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from workers.native.models.config import ModelConfig
from workers.native.models.kv_session import KvSession
from workers.native.models.norm import RmsNorm
from workers.native.models.projection import Projection
from workers.native.models.rope import rotate


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of one layer, fused.

    `qkv` is [hidden, (heads + 2 kv_heads) * head_dim], `gate_up` is [hidden, 2 * intermediate].
    `query_norm` and `key_norm` exist with qk-norm, the two `post_*` with sandwich norms (Gemma).
    """

    attention_norm: RmsNorm
    qkv: Projection
    output: Projection
    mlp_norm: RmsNorm
    gate_up: Projection
    down: Projection
    query_norm: RmsNorm | None = None
    key_norm: RmsNorm | None = None
    post_attention_norm: RmsNorm | None = None
    post_mlp_norm: RmsNorm | None = None


class DecoderLayer:
    """Layer `index` of a model. `attend` up to the attention output, `finish` the rest."""

    def __init__(self, config: ModelConfig, index: int, weights: LayerWeights) -> None:
        self.rope = config.rope_of(index)
        self._index = index
        self._weights = weights
        self._window = config.windows[index]
        self._scale = config.attention_scale
        self._gelu = config.activation == "gelu_tanh"
        self._query_heads, self._kv_heads = config.heads, config.kv_heads
        self._head_dim = config.head_dim
        self._rotated = (config.heads + config.kv_heads) * config.head_dim
        self._intermediate = config.intermediate

    @property
    def weight_bytes(self) -> int:
        """Bytes of this layer's matrices."""
        weights = self._weights
        return sum(
            projection.weight_bytes
            for projection in (weights.qkv, weights.output, weights.gate_up, weights.down)
        )

    def attend(self, hidden: Tensor, rope: tuple[Tensor, Tensor], kv: KvSession) -> Tensor:
        """Hidden [T, hidden], gathered (cos, sin) to attention output [T, heads * head_dim]."""
        weights = self._weights
        normed = weights.attention_norm(hidden)
        projected = weights.qkv(normed)
        rows, heads, dim = hidden.shape[0], self._query_heads, self._head_dim
        turned = projected[:, : self._rotated].view(rows, heads + self._kv_heads, dim)
        value = projected[:, self._rotated :].view(rows, self._kv_heads, dim)
        query, key = turned[:, :heads], turned[:, heads:]
        if weights.query_norm is not None and weights.key_norm is not None:
            query = rotate(weights.query_norm(query), *rope)
            key = rotate(weights.key_norm(key), *rope)
        else:
            turned = rotate(turned, *rope)
            query, key = turned[:, :heads], turned[:, heads:]
        return kv.attend(self._index, query, key, value, scale=self._scale, window=self._window)

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Add the attention output and the MLP to `hidden` [T, hidden], in place."""
        weights = self._weights
        if weights.post_attention_norm is None:
            hidden = weights.output.add_to(hidden, attended)
        else:
            branch = weights.output(attended)
            hidden.add_(weights.post_attention_norm(branch))
        gated = self._gate(weights.gate_up(weights.mlp_norm(hidden)))
        if weights.post_mlp_norm is None:
            return weights.down.add_to(hidden, gated)
        return hidden.add_(weights.post_mlp_norm(weights.down(gated)))

    def _gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up[:, : self._intermediate], gate_up[:, self._intermediate :]
        if self._gelu:
            return F.gelu(gate, approximate="tanh").mul_(up)
        return F.silu(gate, inplace=True).mul_(up)
