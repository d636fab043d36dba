"""Which block holds what: reference counts, prefix reuse by hash, eviction of the oldest.

A full block of a prompt is known by the hash of all tokens up to its end, chained, so equal hashes
mean equal prefixes. A block nobody uses keeps its hash and stays reusable until its memory is
needed; blocks freed longest ago are overwritten first.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

NO_HASH = b""


class OutOfBlocksError(Exception):
    """No free block is left; the caller preempts something or waits."""


def chain_hashes(tokens: Sequence[int], block_tokens: int, salt: bytes) -> list[bytes]:
    """Return one 16-byte hash per full block of `tokens`, each covering everything before it.

    `salt` carries whatever must keep caches apart (model, tenant).
    """
    hashes: list[bytes] = []
    previous = hashlib.blake2b(salt, digest_size=16).digest()
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        block = array("q", tokens[start : start + block_tokens]).tobytes()
        previous = hashlib.blake2b(previous + block, digest_size=16).digest()
        hashes.append(previous)
    return hashes


class BlockTable:
    """Books blocks 0..count-1. Not thread-safe: only the engine thread calls it."""

    def __init__(self, count: int) -> None:
        self._references = [0] * count
        self._hashes = [NO_HASH] * count
        self._by_hash: dict[bytes, int] = {}
        self._blank: list[int] = list(range(count - 1, -1, -1))
        self._reusable: OrderedDict[int, None] = OrderedDict()
        self.evictions = 0
        self.count = count

    @property
    def free(self) -> int:
        """Blocks that can be handed out now, cached ones included."""
        return len(self._blank) + len(self._reusable)

    @property
    def used(self) -> int:
        """Blocks that somebody holds."""
        return self.count - self.free

    @property
    def cached(self) -> int:
        """Blocks whose content can be found by hash."""
        return len(self._by_hash)

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Take the longest cached prefix of `hashes` and return its blocks, now held."""
        found: list[int] = []
        for key in hashes:
            block = self._by_hash.get(key)
            if block is None:
                break
            self.hold(block)
            found.append(block)
        return found

    def hold(self, block: int) -> None:
        """Count one more user of a block."""
        if self._references[block] == 0:
            self._reusable.pop(block, None)
        self._references[block] += 1

    def take(self, count: int) -> list[int]:
        """Hand out `count` blocks of unknown content, or raise OutOfBlocksError and none."""
        if count > self.free:
            raise OutOfBlocksError(f"{count} KV blocks wanted, {self.free} free")
        return [self._take_one() for _ in range(count)]

    def _take_one(self) -> int:
        if self._blank:
            block = self._blank.pop()
        else:
            block, _ = self._reusable.popitem(last=False)
            del self._by_hash[self._hashes[block]]
            self._hashes[block] = NO_HASH
            self.evictions += 1
        self._references[block] = 1
        return block

    def publish(self, block: int, key: bytes) -> None:
        """Make a filled block findable. The first block with a hash keeps it."""
        if self._hashes[block] == NO_HASH and key not in self._by_hash:
            self._hashes[block] = key
            self._by_hash[key] = block

    def drop(self, blocks: Sequence[int]) -> None:
        """Give up one hold on each block; the last one makes it reusable or blank."""
        for block in reversed(blocks):  # the deepest prefix is evicted first
            self._references[block] -= 1
            assert self._references[block] >= 0, f"block {block} was dropped twice"
            if self._references[block] == 0:
                if self._hashes[block] == NO_HASH:
                    self._blank.append(block)
                else:
                    self._reusable[block] = None
