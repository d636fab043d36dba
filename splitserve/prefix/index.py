"""The router's own picture of every worker's prefix cache, by chained block hashes.

A worker that was given a prompt will have its blocks, until newer ones push them out. A siblings'
burst sees the first one's blocks at once. The picture is approximate: it prices plans, and the
worker's own count corrects the models.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class PrefixIndex:
    """One LRU of block hashes per worker, each of at most `limit_blocks`."""

    limit_blocks: int = 65_536
    _workers: dict[str, OrderedDict[int, None]] = field(default_factory=dict)
    _limits: dict[str, int] = field(default_factory=dict)

    def bound(self, worker_id: str, blocks: int) -> None:
        """Set how many blocks a worker can hold."""
        self._limits[worker_id] = max(1, min(blocks, self.limit_blocks))

    def match(self, worker_id: str, hashes: Sequence[int]) -> int:
        """Leading blocks of `hashes` that the worker is taken to have."""
        known = self._workers.get(worker_id)
        if not known:
            return 0
        count = 0
        for block in hashes:
            if block not in known:
                break
            count += 1
        return count

    def add(self, worker_id: str, hashes: Sequence[int]) -> None:
        """The worker was given a prompt with these blocks."""
        if not hashes:
            return
        known = self._workers.setdefault(worker_id, OrderedDict())
        for block in reversed(hashes):  # the deepest goes first when room is needed
            known[block] = None
            known.move_to_end(block)
        limit = self._limits.get(worker_id, self.limit_blocks)
        while len(known) > limit:
            known.popitem(last=False)

    def remove_oldest(self, worker_id: str, blocks: int) -> None:
        """The worker has let go of so many blocks, those first that it used least recently."""
        known = self._workers.get(worker_id) or OrderedDict()
        for _ in range(min(blocks, len(known))):
            known.popitem(last=False)

    def forget(self, worker_id: str) -> None:
        """The worker left, restarted or emptied its cache: it has nothing."""
        self._workers.pop(worker_id, None)
