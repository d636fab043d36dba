"""KV blocks of sequences: admission with prefix reuse, growth, fork, publication, release."""

from __future__ import annotations

from workers.native.engine.sequence import Sequence
from workers.native.kv.blocks import BlockTable, chain_hashes
from workers.native.kv.pool import KvPool


class SequenceMemory:
    """The only place that moves blocks between a `BlockTable` and sequences."""

    def __init__(self, pool: KvPool, table: BlockTable) -> None:
        self._pool = pool
        self.table = table
        self._size = pool.layout.block_tokens

    def admit(self, sequence: Sequence) -> None:
        """Give blocks for all known tokens, the longest cached prefix first.

        Raises OutOfBlocksError and gives nothing when there is no room. At least the last token
        is left to compute, since its logits are needed; a pulled prompt gets its logits with the
        KV, so all of it may come from the cache.
        """
        tokens = sequence.tokens(0, sequence.total)
        if len(sequence.hashes) < len(tokens) // self._size:
            sequence.hashes = chain_hashes(tokens, self._size, sequence.salt)
        pulled = sequence.pull is not None and not sequence.output
        usable = len(tokens) if pulled else len(tokens) - 1
        wanted = 0 if sequence.prompt_logprobs is not None else usable // self._size
        found = self.table.match(sequence.hashes[:wanted])
        need = self._pool.layout.blocks_for(len(tokens)) - len(found)
        try:
            fresh = self.table.take(need)
        except Exception:
            self.table.drop(found)
            raise
        sequence.blocks = [*found, *fresh]
        sequence.published = len(found)
        sequence.computed = len(found) * self._size
        sequence.cached = sequence.computed

    def grow(self, sequence: Sequence) -> None:
        """Make room for the token that is computed next. Raises OutOfBlocksError."""
        if self._pool.layout.blocks_for(sequence.total) > len(sequence.blocks):
            sequence.blocks += self.table.take(1)

    def publish(self, sequence: Sequence) -> None:
        """Make blocks that were filled since the last call findable by later prompts."""
        full = min(sequence.computed, sequence.total) // self._size
        if full > len(sequence.hashes):
            tokens = sequence.tokens(0, full * self._size)
            sequence.hashes = chain_hashes(tokens, self._size, sequence.salt)
        for number in range(sequence.published, full):
            self.table.publish(sequence.blocks[number], sequence.hashes[number])
        sequence.published = max(sequence.published, full)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` start from `parent`'s prompt: share full blocks, copy a started one.

        Raises OutOfBlocksError and gives nothing when there is no room for the copy.
        """
        full, rest = divmod(len(parent.prompt), self._size)
        copies = self.table.take(1) if rest else []
        for block in parent.blocks[:full]:
            self.table.hold(block)
        if rest:
            self._pool.tensor[copies[0]].copy_(self._pool.tensor[parent.blocks[full]])
        child.blocks = [*parent.blocks[:full], *copies]
        child.hashes = list(parent.hashes)
        child.computed, child.cached = len(parent.prompt), parent.cached
        child.published = full

    def blank_tail(self, sequence: Sequence) -> None:
        """Zero the unused end of the last block, so that a hand-off carries nobody else's KV."""
        rest = sequence.total % self._size
        if rest:
            self._pool.tensor[sequence.blocks[-1]][:, :, rest:] = 0

    def scrub(self, sequence: Sequence) -> None:
        """Zero the blocks that a failed hand-off was to fill.

        Half of a block may be any bytes, NaN too, and attention multiplies what it masks by zero:
        a NaN left behind would spoil whoever gets the block next.
        """
        for block in sequence.blocks[sequence.published :]:
            self._pool.tensor[block].zero_()

    def release(self, sequence: Sequence) -> None:
        """Give all blocks back."""
        blocks, sequence.blocks = sequence.blocks, []
        self.table.drop(blocks)
        sequence.computed = sequence.published = 0
