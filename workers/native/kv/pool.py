"""The memory of the KV cache.

On a CPU the pool lives in an anonymous memory file (`memfd`), so that a decode worker on the same
host can map it and copy blocks straight out of it. The file has no name: the kernel frees it when
its last user is gone, whatever way that user died. The first page holds a random token by which a
peer makes sure that it opened the right file.
"""

from __future__ import annotations

import mmap
import os
import secrets

import torch

from workers.native.kv.layout import KvLayout
from workers.native.models.cpu_kernel import CpuKernel

HEADER_BYTES = mmap.PAGESIZE
TOKEN_BYTES = 32


class KvPool:
    """`blocks` blocks of `layout` on one device; `tensor` is [blocks, *layout.block_shape]."""

    def __init__(
        self,
        layout: KvLayout,
        blocks: int,
        device: torch.device,
        kernel: CpuKernel | None = None,
    ) -> None:
        """`kernel` attends over this pool for single tokens; only for float32 on the CPU."""
        self.kernel = kernel
        self.layout = layout
        self.blocks = blocks
        self.device = device
        self.share_token = secrets.token_bytes(TOKEN_BYTES)
        self._fd: int | None = None
        self._map: mmap.mmap | None = None
        if device.type == "cpu":
            self.tensor = self._on_host()
        else:
            self.tensor = torch.zeros(
                (blocks, *layout.block_shape), dtype=layout.dtype, device=device
            )

    def _on_host(self) -> torch.Tensor:
        size_bytes = HEADER_BYTES + self.blocks * self.layout.block_bytes
        if hasattr(os, "memfd_create"):
            self._fd = os.memfd_create("splitserve-kv", os.MFD_CLOEXEC)
            os.ftruncate(self._fd, size_bytes)
            self._map = mmap.mmap(self._fd, size_bytes)
        else:  # no memfd on this system: private memory, peers use TCP
            self._map = mmap.mmap(-1, size_bytes)
        self._map[:TOKEN_BYTES] = self.share_token
        flat = torch.frombuffer(self._map, dtype=torch.uint8, offset=HEADER_BYTES)
        return flat.view(self.layout.dtype).view(self.blocks, *self.layout.block_shape)

    @property
    def share_fd(self) -> int | None:
        """Descriptor of the memory file, or None where it cannot be shared."""
        return self._fd

    def host_block(self, block: int) -> memoryview:
        """Return the bytes of one block in place, writable. CPU pools only."""
        assert self._map is not None, "the pool is not in host memory"
        start = HEADER_BYTES + block * self.layout.block_bytes
        return memoryview(self._map)[start : start + self.layout.block_bytes]

    def read_block(self, block: int) -> memoryview:
        """Return the bytes of one block: in place on a CPU, a copy from any other device."""
        if self._map is not None:
            return self.host_block(block)
        flat = self.tensor[block].contiguous().view(torch.uint8).flatten()
        return flat.cpu().numpy().data

    def write_block(self, block: int, data: memoryview) -> None:
        """Copy bytes of one block into the pool of a device that is not the CPU."""
        staged = torch.frombuffer(data, dtype=torch.uint8).view(self.layout.dtype)
        self.tensor[block].copy_(staged.view(self.layout.block_shape))

    @property
    def in_host_memory(self) -> bool:
        """True when blocks can be read and filled in place."""
        return self._map is not None

    def close(self) -> None:
        """Give the memory file back; the mapping goes with its last tensor."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
