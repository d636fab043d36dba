"""The prefill worker's pool, mapped read-only by a decode worker on the same host."""

from __future__ import annotations

import hmac
import mmap
import os
from typing import Any

from workers.native.kv.pool import HEADER_BYTES, TOKEN_BYTES


class SharedPool:
    """A peer's KV memory. `block(n)` is a read-only view of its block n."""

    def __init__(self, mapping: mmap.mmap, block_bytes: int) -> None:
        self._map = mapping
        self._block_bytes = block_bytes
        self._blocks = (len(mapping) - HEADER_BYTES) // block_bytes

    @classmethod
    def open(cls, share: dict[str, Any], block_bytes: int) -> SharedPool | None:
        """Map the file that `share` names, or return None when it is not on this host.

        The same process number may exist on another host or in another container: only the random
        token in the file's first page proves that it is the peer's.
        """
        try:
            path = f"/proc/{int(share['pid'])}/fd/{int(share['fd'])}"
            token = bytes.fromhex(share["token"])
            # Whatever it is over there, a pipe even, opening it must not wait.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError, TypeError, LookupError, OverflowError):
            return None
        try:
            mapping = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        except (OSError, ValueError):
            return None
        finally:
            os.close(fd)
        if not token or not hmac.compare_digest(mapping[:TOKEN_BYTES], token):
            mapping.close()
            return None
        return cls(mapping, block_bytes)

    def close(self) -> None:
        """Unmap; views of blocks must be gone."""
        self._map.close()

    def block(self, number: int) -> memoryview:
        """Return the bytes of block `number`. Raises IndexError outside the pool."""
        if not 0 <= number < self._blocks:
            raise IndexError(f"block {number} of {self._blocks}")
        start = HEADER_BYTES + number * self._block_bytes
        return memoryview(self._map)[start : start + self._block_bytes]
