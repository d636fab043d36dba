"""One engine step after another: admit, compute, sample, tell. Runs on one thread, knows no other.

`Engine` (engine.py) carries it; tests drive it directly.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from workers.native.engine.batch import Slice, assemble, plan_step
from workers.native.engine.memory import SequenceMemory
from workers.native.engine.sequence import (
    Failed,
    PromptLogprobs,
    PromptReport,
    Sequence,
    Token,
)
from workers.native.engine.settings import EngineSettings
from workers.native.engine.stats import EngineStats
from workers.native.handoff.errors import HandoffBroken
from workers.native.handoff.pull import Pulled
from workers.native.kv.attention import PagedSession, Segment
from workers.native.kv.blocks import BlockTable, OutOfBlocksError
from workers.native.kv.pool import KvPool
from workers.native.models.kv_session import KvSession
from workers.native.sampling.sampler import rank_logprobs, sample

_WARM_UP_TOKENS = 256
_PATIENT_STEP_S = 0.08  # about two decode steps of a small model on a CPU
_LEAST_PATIENT_TOKENS = 32  # fewer would read the weights once for next to nothing

log = logging.getLogger("splitserve.engine")


class Model(Protocol):
    """What the engine needs of a model; `Decoder` is one."""

    def forward(
        self, tokens: Tensor, positions: Tensor, kv: KvSession, logit_rows: Tensor
    ) -> Tensor: ...


class EngineCore:
    """Sequences in, outputs to their sinks. `eos` are the model's end-of-text ids."""

    def __init__(
        self,
        model: Model,
        pool: KvPool,
        settings: EngineSettings,
        eos: frozenset[int],
        clock: Callable[[], float],
    ) -> None:
        self._model = model
        self._pool = pool
        self._settings = settings
        self._eos = eos
        self._clock = clock
        self.memory = SequenceMemory(pool, BlockTable(pool.blocks))
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.stats = EngineStats(kv_capacity_tokens=pool.blocks * pool.layout.block_tokens)

    def _can_admit(self) -> bool:
        return bool(self.waiting) and len(self.running) < self._settings.max_running

    def warm_up(self) -> None:
        """Run a prompt and two decode steps on scratch blocks, and note the speeds.

        The first passes of a process are several times slower than later ones; no client should
        be the one who finds out. To be called before any request.
        """
        tokens = min(_WARM_UP_TOKENS, self._context_limit - 1)
        blocks = range(self._pool.layout.blocks_for(tokens + 1))
        for rows, start in ((tokens, 0), (tokens, 0), (1, tokens), (1, tokens)):
            session = PagedSession(self._pool, [Segment(blocks, start, rows)])
            ids = torch.zeros(rows, dtype=torch.int64, device=self._pool.device)
            positions = torch.arange(start, start + rows, device=self._pool.device)
            last = torch.tensor([rows - 1], device=self._pool.device)
            begun_s = self._clock()
            self._model.forward(ids, positions, session, last).argmax().item()
            duration_s = self._clock() - begun_s
            if rows > 1:
                self.stats.prefill_tok_s = rows / duration_s
            else:
                self.stats.decode_tok_s = 1 / duration_s

    # --- requests come and go -------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence behind those of its priority; it starts in a later step."""
        if sequence.offer is not None and sequence.offer.ended:  # nobody would free its blocks
            sequence.sink(Failed(HandoffBroken(f"the offer ended early: {sequence.offer.ended}")))
            return
        later = (i for i, s in enumerate(self.waiting) if s.priority > sequence.priority)
        at = next(later, len(self.waiting))
        self.waiting.insert(at, sequence)

    def abort(self, request_id: str) -> None:
        """Forget a request. KV that a hand-off thread still writes is kept until it ends."""
        for sequence in [s for s in self.waiting if s.request_id == request_id]:
            self.waiting.remove(sequence)
            sequence.aborted = True
            self._close(sequence, "abort")
        for sequence in [s for s in self.running if s.request_id == request_id]:
            sequence.aborted = True
            if sequence.pulling and sequence.pull is not None:
                sequence.pull.cancel()
            elif sequence.offer is not None:
                self.running.remove(sequence)
                self._close(sequence, "abort")
            else:
                self._retire(sequence, "abort")

    def fail_all(self, error: Exception) -> None:
        """End everything with `error`; blocks of running hand-offs are dropped with the pool."""
        for sequence in [*self.running, *self.waiting]:
            if sequence.pull is not None:
                sequence.pull.cancel()
            if sequence.offer is not None:
                sequence.offer.fail(str(error))
            if not sequence.aborted:
                sequence.sink(Failed(error))
            sequence.aborted = True  # a pull that ends later has nobody left to tell
        for sequence in [s for s in self.running if not s.pulling and s.offer is None]:
            self.memory.release(sequence)
        self.running = [s for s in self.running if s.pulling]
        self.waiting.clear()

    def offer_ended(self, sequence: Sequence) -> None:
        """Nobody reads this sequence's blocks any more: only now may they be used again."""
        for queue in (self.running, self.waiting):
            if sequence in queue:  # it ended before its prefill was done
                queue.remove(sequence)
                reason = sequence.offer.ended if sequence.offer is not None else ""
                sequence.sink(Failed(HandoffBroken(f"the offer ended early: {reason}")))
        self.memory.release(sequence)

    def pull_ended(self, sequence: Sequence, result: Pulled | Exception) -> None:
        """The pull's thread is done: sample the first token, or fail the request."""
        if sequence not in self.running and sequence not in self.waiting:
            return  # it left while it waited for room: it has no blocks, and its end was told
        sequence.pulling = False
        if isinstance(result, Exception) or sequence.aborted:
            self._pull_failed(sequence, result)
            return
        self.stats.pulls += 1
        self.stats.pulled_bytes += result.stats.moved_bytes
        sequence.computed = len(sequence.prompt)
        self.memory.publish(sequence)
        logits = torch.from_numpy(np.frombuffer(result.logits, dtype="<f4"))
        prefill_s = self._clock() - sequence.started_s
        report = PromptReport(
            len(sequence.prompt), sequence.cached, prefill_s, sequence.queued_s, result.stats
        )
        self._prompt_done(sequence, logits, report)

    def _pull_failed(self, sequence: Sequence, result: Pulled | Exception) -> None:
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        if not sequence.aborted and isinstance(result, Exception):
            self.stats.pull_failures += 1
            sequence.sink(Failed(result))
        self.memory.scrub(sequence)
        self._retire(sequence, "abort" if sequence.aborted else "error")

    # --- one step -------------------------------------------------------------------------------

    def step(self) -> bool:
        """Admit what fits, run one forward pass, deliver what came of it.

        False: there was nothing to compute, and there will not be until something comes in.
        """
        self._admit()
        ready = [s for s in self.running if not s.pulling]
        self._make_room([s for s in ready if s.remaining == 1 and s.output])
        ready = [s for s in self.running if not s.pulling]
        slices = plan_step(ready, self._settings.step_tokens, self._patient_tokens)
        if not slices:
            return False
        started_s = self._clock()
        batch = assemble(slices, self._pool)
        logits = self._model.forward(batch.tokens, batch.positions, batch.session, batch.logit_rows)
        self._advance(slices)
        finished: dict[int, Tensor] = {}
        for (piece, row), values in zip(batch.owners, logits, strict=True):
            if piece.sequence.prompt_logprobs is not None:
                self._note_prompt_logprobs(piece, row, values)
            if row == piece.rows - 1 and piece.sequence.remaining == 0:
                finished[id(piece.sequence)] = values
        for piece in slices:
            if id(piece.sequence) in finished:
                self._completed(piece.sequence, finished[id(piece.sequence)])
        decodes = sum(piece.rows == 1 for piece in slices)
        prompt_rows = len(batch.tokens) - decodes
        self.stats.saw_step(decodes, prompt_rows, self._clock() - started_s)
        return True

    def _admit(self) -> None:
        while self._can_admit():
            sequence = self.waiting[0]
            try:
                self.memory.admit(sequence)
            except OutOfBlocksError:
                return
            self.waiting.popleft()
            self.running.append(sequence)
            now_s = self._clock()
            if not sequence.started_s:
                sequence.started_s, sequence.queued_s = now_s, now_s - sequence.arrived_s
            if sequence.pull is not None and not sequence.output:
                sequence.pulling = True
                start = sequence.computed // self._pool.layout.block_tokens
                sequence.pull.begin(sequence.blocks[start:], start)
            self._offer_new_blocks(sequence)

    def _make_room(self, decoding: list[Sequence]) -> None:
        """Give every decoding sequence a slot for its token, preempting the youngest if need be."""
        for sequence in decoding:
            while sequence in self.running:
                try:
                    self.memory.grow(sequence)
                    break
                except OutOfBlocksError:
                    self._preempt()

    def _preempt(self) -> None:
        movable = [s for s in self.running if not s.pulling and s.offer is None]
        youngest = max(movable, key=lambda s: (s.priority, s.arrived_s, s.index))
        self.running.remove(youngest)
        self.memory.release(youngest)
        youngest.prompt_entries.clear()  # they are noted again when the prompt is computed again
        self.waiting.appendleft(youngest)
        self.stats.preemptions += 1
        log.info("preempted %s: the KV cache is full", youngest.request_id)

    def _advance(self, slices: list[Slice]) -> None:
        for piece in slices:
            piece.sequence.computed += piece.rows
            self.memory.publish(piece.sequence)
            self._offer_new_blocks(piece.sequence)

    def _offer_new_blocks(self, sequence: Sequence) -> None:
        if sequence.offer is None:
            return
        full = sequence.computed // self._pool.layout.block_tokens
        if full > sequence.offered:
            sequence.offer.publish(sequence.blocks[sequence.offered : full])
            sequence.offered = full

    def _note_prompt_logprobs(self, piece: Slice, row: int, values: Tensor) -> None:
        sequence = piece.sequence
        position = sequence.computed - piece.rows + row  # computed was advanced already
        if position + 1 < len(sequence.prompt) and sequence.prompt_logprobs is not None:
            token_id = sequence.prompt[position + 1]
            sequence.prompt_entries.append(
                rank_logprobs(values, token_id, sequence.prompt_logprobs)
            )

    # --- results --------------------------------------------------------------------------------

    def _completed(self, sequence: Sequence, logits: Tensor) -> None:
        if sequence.output or sequence.fork:
            self._emit(sequence, logits)
            return
        prefill_s = self._clock() - sequence.started_s
        report = PromptReport(len(sequence.prompt), sequence.cached, prefill_s, sequence.queued_s)
        self._prompt_done(sequence, logits, report)

    def _prompt_done(self, sequence: Sequence, logits: Tensor, report: PromptReport) -> None:
        self.stats.prompt_tokens += report.prompt_tokens
        self.stats.cached_tokens += report.cached_tokens
        if sequence.offer is not None:
            self._finish_offer(sequence, logits)
            sequence.sink(report)
            return
        sequence.sink(report)
        if sequence.prompt_logprobs is not None:
            entries = tuple(sequence.prompt_entries)
            sequence.sink(PromptLogprobs(sequence.index, entries))
        for sibling in sequence.siblings:
            self._start_sibling(sequence, sibling, logits)
        self._emit(sequence, logits)

    def _finish_offer(self, sequence: Sequence, logits: Tensor) -> None:
        offer = sequence.offer
        assert offer is not None
        self.running.remove(sequence)
        if sequence.offered < len(sequence.blocks):
            self.memory.blank_tail(sequence)
            offer.publish(sequence.blocks[sequence.offered :])
            sequence.offered = len(sequence.blocks)
        values = np.ascontiguousarray(logits.float().cpu().numpy(), dtype="<f4")
        offer.finish(values.data.cast("B"))

    def _start_sibling(self, parent: Sequence, sibling: Sequence, logits: Tensor) -> None:
        sibling.started_s = parent.started_s
        try:
            self.memory.fork(parent, sibling)
        except OutOfBlocksError:  # it prefills by itself, mostly from the cache
            self.waiting.append(sibling)
            return
        self.running.append(sibling)
        self._emit(sibling, logits)

    def _emit(self, sequence: Sequence, logits: Tensor) -> None:
        """Sample one token, send it, and end the sequence where it is the last."""
        params = sequence.params
        if params.max_tokens == 0:  # echo of a prompt alone
            sequence.sink(Token(sequence.index, -1, "", finish="length"))
            self._retire(sequence, "length")
            return
        early = len(sequence.output) < params.min_tokens
        ends = self._eos | params.stop_token_ids
        chosen = sample(
            logits,
            params,
            sequence.prompt,
            sequence.output,
            sequence=sequence.fork,
            banned=sorted(ends) if early else (),
        )
        sequence.output.append(chosen.token_id)
        self.stats.output_tokens += 1
        text, finish = self._text_of(sequence, chosen.token_id)
        sequence.sink(
            Token(sequence.index, chosen.token_id, text, chosen.logprob, chosen.top, finish)
        )
        if finish is not None:
            self._retire(sequence, finish)

    def _text_of(self, sequence: Sequence, token_id: int) -> tuple[str, str | None]:
        params = sequence.params
        if token_id in params.stop_token_ids or (token_id in self._eos and not params.ignore_eos):
            return sequence.text.finish(), "stop"
        text = sequence.text.feed(token_id)
        if sequence.text.stopped:
            return text, "stop"
        full = sequence.total >= self._context_limit
        if len(sequence.output) >= params.max_tokens or full:
            return text + sequence.text.finish(), "length"
        return text, None

    @property
    def _patient_tokens(self) -> int:
        """Tokens of a patient prompt that take no longer than an urgent one should wait."""
        quick = int(_PATIENT_STEP_S * self.stats.prefill_tok_s)
        return min(self._settings.step_tokens, max(_LEAST_PATIENT_TOKENS, quick))

    @property
    def _context_limit(self) -> int:
        return self._settings.max_context_tokens or self.stats.kv_capacity_tokens

    def _retire(self, sequence: Sequence, reason: str) -> None:
        if sequence in self.running:
            self.running.remove(sequence)
        self.memory.release(sequence)
        self._close(sequence, reason)

    def _close(self, sequence: Sequence, reason: str) -> None:
        self.stats.saw_finish(reason)
        if sequence.offer is not None:
            sequence.offer.fail("the prefill request was cancelled")
        if sequence.pull is not None:
            sequence.pull.cancel()
