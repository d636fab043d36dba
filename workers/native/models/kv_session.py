"""What a model asks of the KV cache during one forward pass."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class KvSession(Protocol):
    """Keys and values of the sequences in one forward pass."""

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
        """Store `key` and `value` of this layer's new rows and attend to all that is stored.

        query [T, heads, head_dim], key and value [T, kv_heads, head_dim], in the model's dtype,
        rows of several sequences packed. They may be strided views of larger tensors and are
        overwritten after the call: copy what is kept. `window` is the sliding-window size in
        tokens (a query at position p sees positions p-window+1 .. p) or None.
        Returns [T, heads * head_dim].
        """
