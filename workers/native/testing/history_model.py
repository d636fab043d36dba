"""A model whose next token depends on every (token, position) before it, and on nothing else.

It keeps all it knows in the KV cache, as real models do, so a block that is missing, stale, or
another request's changes its answer. What it should answer is a plain sum, known without a cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.native.kv.layout import KvLayout
from workers.native.kv.pool import KvPool
from workers.native.models.kv_session import KvSession

_WIDTH = 16
_KEPT = 512  # positions that differ from each other


class HistoryModel:
    """`forward` of `Decoder` over `vocab_size` tokens, in float64: sums agree in any order.

    A token leaves a random vector, one per position, as its value; all keys are zero, so attention
    takes the plain mean of what is visible, and the mean times the length is the sum.
    """

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        self._values = torch.randn(vocab_size, _KEPT, _WIDTH, generator=draw, dtype=torch.float64)
        self._head = torch.randn(_WIDTH, vocab_size, generator=draw, dtype=torch.float64)
        self.fail_next = False

    @staticmethod
    def layout(block_tokens: int) -> KvLayout:
        """The KV layout that this model needs."""
        return KvLayout(1, 1, _WIDTH, torch.float64, block_tokens)

    def forward(
        self, tokens: Tensor, positions: Tensor, kv: KvSession, logit_rows: Tensor
    ) -> Tensor:
        """See `Decoder.forward`. Raises RuntimeError once when `fail_next` is set."""
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("this step was told to fail")
        value = self._values[tokens, positions].unsqueeze(1)
        blank = torch.zeros_like(value)
        mean = kv.attend(0, blank, blank, value, scale=1.0, window=None)
        total = mean * (positions + 1).unsqueeze(1)
        return (total @ self._head).float()[logit_rows]

    def logits_after(self, history: Sequence[int]) -> Tensor:
        """Logits [vocab_size] that follow `history`, computed without a cache."""
        total = self._values[torch.tensor(history), torch.arange(len(history))].sum(0)
        return (total @ self._head).float()

    def block(self, layout: KvLayout, prompt: Sequence[int], number: int) -> Tensor:
        """What block `number` of a prompt must hold: `layout.block_shape`, zeros after its end."""
        size = layout.block_tokens
        held = torch.tensor(prompt[number * size : (number + 1) * size], dtype=torch.int64)
        at = torch.arange(number * size, number * size + len(held))
        content = torch.zeros(layout.block_shape, dtype=layout.dtype)
        content[0, 1, : len(held), 0] = self._values[held, at]
        return content

    def fill(self, pool: KvPool, prompt: Sequence[int], blocks: Sequence[int], first: int) -> None:
        """Write the prompt's KV from block number `first` on into `blocks`, as a hand-off does."""
        for number, block in enumerate(blocks, start=first):
            pool.tensor[block] = self.block(pool.layout, prompt, number)

    def holds(self, pool: KvPool, prompt: Sequence[int], blocks: Sequence[int]) -> bool:
        """Whether `blocks` hold exactly the prompt's KV."""
        return all(
            torch.equal(pool.tensor[block], self.block(pool.layout, prompt, number))
            for number, block in enumerate(blocks)
        )
