"""Which rows go into the next forward step."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.native.engine.sequence import Sequence
from workers.native.kv.attention import PagedSession, Segment
from workers.native.kv.pool import KvPool

_LOGPROB_CHUNK_TOKENS = 64  # echo with logprobs needs a row of logits for every token


@dataclass(frozen=True, slots=True)
class Slice:
    """`rows` tokens of one sequence in this step."""

    sequence: Sequence
    rows: int

    @property
    def completes(self) -> bool:
        """True when the sequence's next token can be sampled after this step."""
        return self.rows == self.sequence.remaining


def plan_step(
    running: Seq[Sequence], budget_tokens: int, patient_tokens: int | None = None
) -> list[Slice]:
    """Every decoding sequence one row, then prompts by priority and arrival, within the budget.

    Decodes are never held back by prompts: the budget bounds how long a step may make them wait.
    Prompts of lower priority than the usual 0 get at most `patient_tokens` of a step, and none
    beside more urgent ones: no urgent prompt waits for more than one such piece.
    """
    decodes = [Slice(s, 1) for s in running if s.remaining == 1]
    left = budget_tokens - len(decodes)
    prompts: list[Slice] = []
    for sequence in sorted(running, key=lambda s: s.priority):  # stable: age within a priority
        if sequence.remaining > 1 and sequence.priority > 0 and patient_tokens is not None:
            if any(piece.sequence.priority <= 0 for piece in prompts):
                break
            left, patient_tokens = min(left, patient_tokens), None
        if sequence.remaining <= 1 or left <= 0:
            continue
        limit = left if sequence.prompt_logprobs is None else min(left, _LOGPROB_CHUNK_TOKENS)
        rows = min(sequence.remaining, limit)
        prompts.append(Slice(sequence, rows))
        left -= rows
    return decodes + sorted(prompts, key=lambda piece: piece.rows > 1)


@dataclass(frozen=True, slots=True)
class StepInput:
    """Tensors of one forward step; `owners[i]` is the slice and row that logits row i is for."""

    tokens: Tensor
    positions: Tensor
    session: PagedSession
    logit_rows: Tensor
    owners: list[tuple[Slice, int]]


def assemble(slices: Seq[Slice], pool: KvPool) -> StepInput:
    """Pack slices into one ragged batch."""
    ids: list[int] = []
    positions: list[int] = []
    segments: list[Segment] = []
    wanted: list[int] = []
    owners: list[tuple[Slice, int]] = []
    for piece in slices:
        sequence, start = piece.sequence, piece.sequence.computed
        first_row = len(ids)
        ids.extend(sequence.tokens(start, piece.rows))
        positions.extend(range(start, start + piece.rows))
        segments.append(Segment(sequence.blocks, start, piece.rows))
        rows = range(piece.rows) if _wants_all(sequence) else range(piece.rows - 1, piece.rows)
        if _wants_all(sequence) or piece.completes:
            wanted.extend(first_row + row for row in rows)
            owners.extend((piece, row) for row in rows)
    device = pool.device
    return StepInput(
        torch.tensor(ids, dtype=torch.int64, device=device),
        torch.tensor(positions, dtype=torch.int64, device=device),
        PagedSession(pool, segments),
        torch.tensor(wanted, dtype=torch.int64, device=device),
        owners,
    )


def _wants_all(sequence: Sequence) -> bool:
    return sequence.prompt_logprobs is not None and sequence.computed < len(sequence.prompt)
