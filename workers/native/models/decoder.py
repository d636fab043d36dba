"""The decoder model: token ids in, logits out; keys and values live with the KvSession.

The boundary to the rest of the engine: `KvSession` is what the model asks of the KV cache,
`Decoder.forward` is what the engine asks of the model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from workers.native.models.config import ModelConfig, RopeSpec
from workers.native.models.cpu_kernel import CpuKernel
from workers.native.models.errors import ContextLengthError
from workers.native.models.kv_session import KvSession
from workers.native.models.layer import DecoderLayer
from workers.native.models.norm import RmsNorm
from workers.native.models.projection import Projection
from workers.native.models.rope import RopeTable

__all__ = ["Decoder", "KvSession"]


class Decoder:
    """A Llama-family or Gemma 3 text model with its weights on one device.

    Safe to call from one thread at a time. Everything runs under `torch.inference_mode`.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        embedding: Tensor | None,
        layers: Sequence[DecoderLayer],
        final_norm: RmsNorm,
        head: Projection,
        dtype: torch.dtype,
        device: torch.device,
        cpu_kernel: CpuKernel | None = None,
    ) -> None:
        """`embedding` is [vocab, hidden], or None where it is the head's weights (tied).

        `cpu_kernel` is the kernel that the weights were laid out for; the KV cache may use it too.
        """
        self.config = config
        self.dtype = dtype
        self.device = device
        self.cpu_kernel = cpu_kernel
        self._embedding = embedding
        self._layers = tuple(layers)
        self._final_norm = final_norm
        self._head = head
        # Rounded to the model's dtype first, as transformers' Gemma3TextScaledWordEmbedding does.
        self._embedding_scale = float(torch.tensor(config.embedding_scale).to(dtype))
        self._tables: dict[RopeSpec, RopeTable] = {
            spec: RopeTable(spec, config.head_dim, config.max_context_tokens, dtype, device)
            for spec in {config.rope_of(layer) for layer in range(config.layers)}
        }

    @property
    def weight_bytes_per_token(self) -> int:
        """Bytes of weights that one decode step reads: every layer's matrices and the head."""
        return self._head.weight_bytes + sum(layer.weight_bytes for layer in self._layers)

    @torch.inference_mode()
    def forward(
        self, tokens: Tensor, positions: Tensor, kv: KvSession, logit_rows: Tensor
    ) -> Tensor:
        """Run new tokens of one or several sequences through the model.

        `tokens` and `positions` are int64 [T], rows of one sequence in rising position order.
        `logit_rows` is int64 [R]: the rows of interest, 0 <= row < T, may be empty. Returns float32
        logits [R, vocab_size]. The caller keeps positions below `config.max_context_tokens`
        (see `check_positions`).
        """
        hidden = self._embed(tokens)
        ropes = {spec: table.gather(positions) for spec, table in self._tables.items()}
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            attended = layer.attend(hidden, ropes[layer.rope], kv)
            if index == last and logit_rows.shape[0] != hidden.shape[0]:
                # Nobody reads the other rows of the last layer: skip their output and MLP work.
                hidden = hidden.index_select(0, logit_rows)
                attended = attended.index_select(0, logit_rows)
                logit_rows = torch.arange(logit_rows.shape[0], device=self.device)
            hidden = layer.finish(hidden, attended)
        hidden = hidden.index_select(0, logit_rows)
        return self._head(self._final_norm(hidden)).float()

    def check_positions(self, last_position: int) -> None:
        """Raise ContextLengthError when `last_position` is beyond the context window."""
        if last_position >= self.config.max_context_tokens:
            raise ContextLengthError(
                f"position {last_position} is beyond the model's context window of "
                f"{self.config.max_context_tokens} tokens; shorten the prompt or lower max_tokens"
            )

    def _embed(self, tokens: Tensor) -> Tensor:
        if self._embedding is None:
            hidden = self._head.columns(tokens)
        else:
            hidden = F.embedding(tokens, self._embedding)
        return hidden.mul_(self._embedding_scale) if self._embedding_scale != 1.0 else hidden
