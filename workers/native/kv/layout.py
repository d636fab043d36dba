"""The shape of a KV block, and what two workers must share to exchange one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

LAYOUT_NAME = "block-layer-kv-token-head-dim"


@dataclass(frozen=True, slots=True)
class KvLayout:
    """One block is contiguous: [layers, 2 (K then V), block_tokens, kv_heads, head_dim].

    Token-major rows make a gathered block list a plain [tokens, heads, dim] tensor, and a block
    one run of bytes that a socket can send and fill without staging.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    block_tokens: int = 16

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """Shape of one block."""
        return (self.layers, 2, self.block_tokens, self.kv_heads, self.head_dim)

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.token_bytes * self.block_tokens

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_tokens)

    def describe(self) -> str:
        """Return the part of the pairing key that concerns memory."""
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"layout={LAYOUT_NAME};dtype={dtype};block={self.block_tokens};"
            f"layers={self.layers};kv_heads={self.kv_heads};head_dim={self.head_dim}"
        )
