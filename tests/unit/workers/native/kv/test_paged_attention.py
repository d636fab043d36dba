"""`PagedSession.attend` over random block tables against plain attention, row by row."""

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from workers.native.kv.attention import PagedSession, Segment
from workers.native.kv.layout import KvLayout
from workers.native.kv.pool import KvPool

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """Decode rows at `decodes`, prompt chunks (start, rows) in `chunks`."""

    decodes: tuple[int, ...]
    chunks: tuple[tuple[int, int], ...]
    kv_heads: int
    fan: int
    head_dim: int
    block_tokens: int
    window: int | None
    scale: float
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    chunks = st.tuples(st.integers(0, 20), st.integers(2, 14))
    return Case(
        decodes=tuple(draw(st.lists(st.integers(0, 40), max_size=5))),
        chunks=tuple(draw(st.lists(chunks, max_size=3))),
        kv_heads=draw(st.sampled_from([1, 2, 3])),
        fan=draw(st.sampled_from([1, 2, 3])),
        head_dim=draw(st.sampled_from([4, 8])),
        block_tokens=draw(st.sampled_from([1, 3, 4, 16])),
        window=draw(st.none() | st.integers(1, 25)),
        scale=draw(st.sampled_from([0.35, 1.0])),
        seed=draw(st.integers(0, 2**16)),
    )


def dense_row(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """One row: query [H, D], keys and values [S, H, D] that it may see; returns [H * D]."""
    scores = torch.einsum("hd,shd->hs", query, keys) * scale
    return torch.einsum("hs,shd->hd", scores.softmax(-1), values).flatten()


class Layered:
    """Sequences with random KV in a pool of random blocks, garbage everywhere else."""

    def __init__(self, case: Case, layers: int = 2) -> None:
        self.case, self.layers = case, layers
        self.draw = torch.Generator().manual_seed(case.seed)
        self.spans = [(at, 1) for at in case.decodes] + list(case.chunks)
        size = case.block_tokens
        widths = [-(-(start + rows) // size) for start, rows in self.spans]
        layout = KvLayout(layers, case.kv_heads, case.head_dim, torch.float32, size)
        self.pool = KvPool(layout, sum(widths) + 2, CPU)
        self.pool.tensor.fill_(1e4)  # finite, and ruinous wherever it is looked at
        numbers = random.Random(case.seed).sample(range(self.pool.blocks), sum(widths))
        self.segments, self.truth = [], []
        for (start, rows), width in zip(self.spans, widths, strict=True):
            blocks, numbers = numbers[:width], numbers[width:]
            self.segments.append(Segment(blocks, start, rows))
            shape = (layers, 2, start + rows, case.kv_heads, case.head_dim)
            known = torch.randn(shape, generator=self.draw)
            for position in range(start):
                block, offset = blocks[position // size], position % size
                self.pool.tensor[block, :, :, offset] = known[:, :, position]
            self.truth.append(known)

    def check(self, session: PagedSession, layer: int, window: int | None) -> None:
        case = self.case
        total = sum(rows for _, rows in self.spans)
        query = torch.randn(total, case.kv_heads * case.fan, case.head_dim, generator=self.draw)
        new = [
            known[layer, :, -rows:] for known, (_, rows) in zip(self.truth, self.spans, strict=True)
        ]
        key, value = torch.cat(new, dim=1)
        out = session.attend(layer, query, key, value, scale=case.scale, window=window)
        expected, row = torch.empty_like(out), 0
        for known, (start, rows) in zip(self.truth, self.spans, strict=True):
            for position in range(start, start + rows):
                first = 0 if window is None else max(0, position - window + 1)
                seen = known[layer, :, first : position + 1]
                keys, values = seen.repeat_interleave(case.fan, dim=2)
                expected[row] = dense_row(query[row], keys, values, case.scale)
                row += 1
        assert out.shape == (total, case.kv_heads * case.fan * case.head_dim)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@settings(max_examples=120, deadline=None)
@given(case=cases().filter(lambda case: bool(case.decodes or case.chunks)))
def test_ragged_batches_equal_plain_attention(case: Case) -> None:
    world = Layered(case)
    session = PagedSession(world.pool, world.segments)
    world.check(session, 0, case.window)
    world.check(session, 1, None)  # the next layer of the same step has its own window
    world.pool.close()


@pytest.mark.parametrize("window", [None, 1, 3, 16, 17])
@pytest.mark.parametrize("edge", [15, 16, 17, 31, 32])
def test_block_edges(window: int | None, edge: int) -> None:
    case = Case((edge, 0, edge - 1), ((edge - 2, 4), (0, edge)), 2, 2, 8, 16, window, 0.3, edge)
    world = Layered(case, layers=1)
    world.check(PagedSession(world.pool, world.segments), 0, window)
    world.pool.close()


def test_new_rows_are_stored_where_they_belong() -> None:
    pool = KvPool(KvLayout(1, 1, 4, torch.float32, 4), 4, CPU)
    session = PagedSession(pool, [Segment([2], 1, 1), Segment([3, 0], 2, 4)])
    rows = torch.arange(20, dtype=torch.float32).view(5, 1, 4)
    session.attend(0, rows, rows + 100, rows + 200, scale=1.0, window=None)
    stored = torch.zeros_like(pool.tensor)
    for row, (block, offset) in enumerate([(2, 1), (3, 2), (3, 3), (0, 0), (0, 1)]):
        stored[block, 0, 0, offset] = rows[row] + 100
        stored[block, 0, 1, offset] = rows[row] + 200
    assert torch.equal(pool.tensor, stored)
    pool.close()


def test_single_rows_must_come_first() -> None:
    pool = KvPool(KvLayout(1, 1, 4, torch.float32, 4), 4, CPU)
    with pytest.raises(AssertionError, match="single rows come first"):
        PagedSession(pool, [Segment([0], 0, 2), Segment([1], 0, 1)])
    pool.close()
