"""Attention over pages, for a batch of rows that belong to several sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.native.kv.pool import KvPool

Pages = tuple[Tensor, Tensor]  # K and V of one layer, each [blocks, tokens, kv_heads, head_dim]


@dataclass(frozen=True, slots=True)
class Segment:
    """`rows` new tokens of one sequence, the first at position `start`, in its `blocks`."""

    blocks: Sequence[int]
    start: int
    rows: int

    @property
    def context_tokens(self) -> int:
        """Tokens the last row may look at, itself included."""
        return self.start + self.rows


@dataclass(slots=True)
class _Group:
    """Segments that share one attention call: one long segment, or all single rows."""

    first_row: int
    rows: int
    context_tokens: int
    table: Tensor  # int64 [sequences, blocks]
    positions: Tensor  # int64 [sequences, rows per sequence], absolute
    lengths: Tensor | None  # int64 [sequences], tokens so far, where each has one row
    masks: dict[int | None, Tensor] = field(default_factory=dict)


class PagedSession:
    """One forward step's view of the KV pool. Rows must be packed single rows first.

    Implements `KvSession` of workers.native.models.decoder.
    """

    def __init__(self, pool: KvPool, segments: Sequence[Segment]) -> None:
        self._pool = pool
        size = pool.layout.block_tokens
        device = pool.device
        slots = [
            segment.blocks[position // size] * size + position % size
            for segment in segments
            for position in range(segment.start, segment.context_tokens)
        ]
        at = torch.tensor(slots, dtype=torch.int64, device=device)
        self._blocks = torch.div(at, size, rounding_mode="floor")
        self._offsets = at - self._blocks * size
        self._rows = pool.tensor.permute(1, 2, 0, 3, 4, 5)  # [layers, 2, blocks, tokens, H, D]
        self._groups = self._grouped(segments)

    def _grouped(self, segments: Sequence[Segment]) -> list[_Group]:
        singles = [s for s in segments if s.rows == 1]
        assert list(segments[: len(singles)]) == singles, "single rows come first"
        groups = [self._group(0, singles)] if singles else []
        row = len(singles)
        for segment in segments[len(singles) :]:
            groups.append(self._group(row, [segment]))
            row += segment.rows
        return groups

    def _group(self, first_row: int, segments: Sequence[Segment]) -> _Group:
        device, size = self._pool.device, self._pool.layout.block_tokens
        context_tokens = max(s.context_tokens for s in segments)
        width = -(-context_tokens // size)
        table = [[*s.blocks[:width], *([0] * (width - len(s.blocks)))] for s in segments]
        rows = segments[0].rows
        positions = [range(s.start, s.start + rows) for s in segments]
        return _Group(
            first_row,
            rows * len(segments),
            context_tokens,
            torch.tensor(table, dtype=torch.int64, device=device),
            torch.tensor([list(p) for p in positions], dtype=torch.int64, device=device),
            torch.tensor([s.context_tokens for s in segments]) if rows == 1 else None,
        )

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
        """Store the new rows' K and V, then attend each row to its own sequence so far.

        query [T, H, D], key and value [T, Hkv, D]; returns [T, H*D]. `window` limits how far back
        a row looks, itself included.
        """
        keys, values = self._rows[layer, 0], self._rows[layer, 1]
        groups, outputs = self._groups, []
        kernel, single = self._pool.kernel, groups[0]
        lengths = single.lengths
        if kernel is not None and lengths is not None and query.shape[-1] % 16 == 0:
            groups, rows = groups[1:], single.rows
            outputs.append(
                kernel.attend_paged(
                    *(query[:rows], key[:rows], value[:rows]),
                    pages=(keys, values),
                    table=single.table,
                    lengths=lengths,
                    longest=single.context_tokens,
                    scale=scale,
                    window=window,
                )
            )
        if groups:
            keys.index_put_((self._blocks, self._offsets), key)
            values.index_put_((self._blocks, self._offsets), value)
        outputs += [self._attend(group, (keys, values), query, scale, window) for group in groups]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend(
        self, group: _Group, pages: Pages, query: Tensor, scale: float, window: int | None
    ) -> Tensor:
        batch = group.table.shape[0]
        heads, dim = query.shape[1:]
        kv_heads = pages[0].shape[2]
        index = group.table.flatten()

        def gather(of: Tensor) -> Tensor:  # [batch, kv_heads, context, dim]
            found = of.index_select(0, index).view(batch, -1, kv_heads, dim)
            return found[:, : group.context_tokens].transpose(1, 2)

        rows = group.rows // batch
        fan = heads // kv_heads
        rows_q = query[group.first_row : group.first_row + group.rows]
        # Query heads that share a KV head become extra rows of it: no copy of K and V per head.
        shaped = rows_q.view(batch, rows, kv_heads, fan, dim).permute(0, 2, 3, 1, 4)
        shaped = shaped.reshape(batch, kv_heads, fan * rows, dim)
        mask = self._mask(group, window, fan, query.dtype)
        out = F.scaled_dot_product_attention(
            shaped, gather(pages[0]), gather(pages[1]), attn_mask=mask, scale=scale
        )
        out = out.view(batch, kv_heads, fan, rows, dim).permute(0, 3, 1, 2, 4)
        return out.reshape(group.rows, heads * dim)

    def _mask(self, group: _Group, window: int | None, fan: int, dtype: torch.dtype) -> Tensor:
        """Additive mask [batch, 1, fan * rows, context], made once per step and kind."""
        known = group.masks.get(window)
        if known is None:
            column = torch.arange(group.context_tokens, device=self._pool.device)
            row = group.positions.unsqueeze(-1)
            hidden = column > row
            if window is not None:
                hidden |= column <= row - window
            blank = torch.zeros(hidden.shape, dtype=dtype, device=self._pool.device)
            blank.masked_fill_(hidden, float("-inf"))
            known = blank.repeat(1, fan, 1).unsqueeze(1)
            group.masks[window] = known
        return known
