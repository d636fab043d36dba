"""The plainest KvSession: one sequence, contiguous storage, no paging.

The reference that the paged cache is compared with, and what the speed measurement runs on.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from workers.native.models.config import ModelConfig


class DenseKv:
    """Keys and values of one sequence of at most `capacity_tokens` tokens.

    Call `advance(T)` after each forward pass of T tokens; `rewind(n)` keeps the first n tokens.
    """

    def __init__(
        self,
        config: ModelConfig,
        capacity_tokens: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (config.layers, 2, config.kv_heads, capacity_tokens, config.head_dim)
        self._store = torch.empty(shape, dtype=dtype, device=device)
        self._grouped = config.heads != config.kv_heads
        self.length_tokens = 0

    def advance(self, tokens: int) -> None:
        """The forward pass of `tokens` new tokens is complete."""
        self.length_tokens += tokens

    def rewind(self, tokens: int) -> None:
        """Forget everything after the first `tokens` tokens."""
        self.length_tokens = tokens

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """See KvSession."""
        rows, start = query.shape[0], self.length_tokens
        end = start + rows
        store = self._store[layer]
        store[0, :, start:end] = key.transpose(0, 1)
        store[1, :, start:end] = value.transpose(0, 1)
        first = 0 if window is None else max(0, start - window + 1)
        mask, causal = self._mask(start, end, first, window, query.device)
        attended = F.scaled_dot_product_attention(
            query.transpose(0, 1).unsqueeze(0),
            store[0, :, first:end].unsqueeze(0),
            store[1, :, first:end].unsqueeze(0),
            attn_mask=mask,
            is_causal=causal,
            scale=scale,
            enable_gqa=self._grouped,
        )
        return attended[0].transpose(0, 1).reshape(rows, -1)

    def _mask(
        self, start: int, end: int, first: int, window: int | None, device: torch.device
    ) -> tuple[Tensor | None, bool]:
        """(boolean mask [T, keys] or None, is_causal), queries start..end, keys first..end."""
        if end - start == 1:
            return None, False
        if start == 0 and (window is None or end <= window):
            return None, True
        positions = torch.arange(start, end, device=device).unsqueeze(1)
        keys = torch.arange(first, end, device=device)
        visible = keys <= positions
        if window is not None:
            visible &= keys > positions - window
        return visible, False
