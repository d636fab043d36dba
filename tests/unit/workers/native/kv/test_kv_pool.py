"""The KV memory: views of blocks, and its file as another process of this host sees it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from subprocess import PIPE
from typing import Any

import pytest
import torch

from workers.native.handoff.shared_pool import SharedPool
from workers.native.kv.layout import KvLayout
from workers.native.kv.pool import HEADER_BYTES, TOKEN_BYTES, KvPool
from workers.native.testing.waiting import open_files

LAYOUT = KvLayout(layers=2, kv_heads=3, head_dim=4, dtype=torch.float32, block_tokens=4)
CPU = torch.device("cpu")


@pytest.fixture
def pool() -> Iterator[KvPool]:
    pool = KvPool(LAYOUT, 5, CPU)
    pool.tensor.copy_(torch.arange(pool.tensor.numel()).view(pool.tensor.shape))
    yield pool
    pool.close()


def share_of(pool: KvPool) -> dict[str, Any]:
    return {"pid": os.getpid(), "fd": pool.share_fd, "token": pool.share_token.hex()}


def test_sizes() -> None:
    assert LAYOUT.token_bytes == 2 * 2 * 3 * 4 * 4
    assert LAYOUT.block_bytes == LAYOUT.token_bytes * 4
    assert [LAYOUT.blocks_for(tokens) for tokens in (0, 1, 4, 5)] == [0, 1, 1, 2]
    other = KvLayout(layers=2, kv_heads=3, head_dim=4, dtype=torch.bfloat16, block_tokens=4)
    assert other.describe() != LAYOUT.describe()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_new_pool_is_zero_in_every_dtype(dtype: torch.dtype) -> None:
    pool = KvPool(KvLayout(1, 1, 8, dtype, 4), 3, CPU)
    assert pool.tensor.dtype == dtype
    assert pool.tensor.shape == (3, 1, 2, 4, 1, 8)
    assert not pool.tensor.any()
    pool.close()


def test_a_block_of_bytes_is_the_tensor_s_memory(pool: KvPool) -> None:
    for block in range(pool.blocks):
        expected = pool.tensor[block].numpy().tobytes()
        assert bytes(pool.host_block(block)) == expected
        assert bytes(pool.read_block(block)) == expected
    pool.host_block(3)[:4] = torch.tensor([7.5]).numpy().tobytes()
    assert pool.tensor[3].flatten()[0] == 7.5
    assert pool.tensor[2].flatten()[-1] == 3 * LAYOUT.block_bytes // 4 - 1
    pool.tensor[4].fill_(-1.0)
    assert torch.frombuffer(pool.host_block(4), dtype=torch.float32).eq(-1).all()


def test_write_block_copies_bytes_of_the_layout(pool: KvPool) -> None:
    data = torch.rand(LAYOUT.block_shape)
    pool.write_block(1, memoryview(bytearray(data.numpy().tobytes())))
    assert torch.equal(pool.tensor[1], data)


def test_tokens_differ_from_pool_to_pool(pool: KvPool) -> None:
    other = KvPool(LAYOUT, 1, CPU)
    assert other.share_token != pool.share_token
    assert len(pool.share_token) == TOKEN_BYTES
    other.close()
    assert other.share_fd is None


READER = """
import json, sys
from workers.native.handoff.shared_pool import SharedPool

shared = SharedPool.open(json.loads(sys.stdin.readline()), int(sys.argv[1]))
for line in sys.stdin:
    print(bytes(shared.block(int(line))).hex(), flush=True)
try:
    shared.block(0)[0] = 1
except TypeError as error:
    print(error)
"""


def test_another_process_maps_the_same_memory(pool: KvPool) -> None:
    command = [sys.executable, "-c", READER, str(LAYOUT.block_bytes)]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) as reader:
        assert reader.stdin is not None
        assert reader.stdout is not None

        def seen(block: int) -> bytes:
            assert reader.stdin is not None
            assert reader.stdout is not None
            reader.stdin.write(f"{block}\n")
            reader.stdin.flush()
            return bytes.fromhex(reader.stdout.readline())

        reader.stdin.write(json.dumps(share_of(pool)) + "\n")
        for block in range(pool.blocks):
            assert seen(block) == bytes(pool.host_block(block))
        pool.tensor[0].fill_(9.0)
        assert seen(0) == bytes(pool.host_block(0))
        reader.stdin.close()
        assert "read-only" in reader.stdout.readline()
    assert reader.returncode == 0


def test_a_map_has_bounds_and_lets_go(pool: KvPool) -> None:
    before = open_files()
    shared = SharedPool.open(share_of(pool), LAYOUT.block_bytes)
    assert shared is not None
    for outside in (-1, 5, 2**63):
        with pytest.raises(IndexError, match="of 5"):
            shared.block(outside)
    shared.close()
    assert open_files() == before


@pytest.mark.parametrize(
    "change",
    [
        {"token": "00" * TOKEN_BYTES},
        {"token": ""},
        {"token": "zz"},
        {"token": 5},
        {"token": None},
        {"pid": 2**22 + 1},
        {"pid": "none"},
        {"pid": float("inf")},
        {"pid": None},
        {"fd": 10**6},
        {"fd": -1},
        {"fd": {}},
    ],
    ids=str,
)
def test_what_is_not_the_peer_s_memory_is_refused(pool: KvPool, change: dict[str, Any]) -> None:
    before = open_files()
    assert SharedPool.open(share_of(pool) | change, LAYOUT.block_bytes) is None
    assert SharedPool.open({}, LAYOUT.block_bytes) is None
    assert open_files() == before


def test_a_pipe_under_that_number_is_refused_at_once(pool: KvPool) -> None:
    read_end, write_end = os.pipe()
    for fd in (read_end, write_end):
        assert SharedPool.open(share_of(pool) | {"fd": fd}, LAYOUT.block_bytes) is None
    os.close(write_end)  # nobody could ever write: a plain open would wait forever
    assert SharedPool.open(share_of(pool) | {"fd": read_end}, LAYOUT.block_bytes) is None
    os.close(read_end)


def test_another_file_of_the_same_process_is_refused(pool: KvPool) -> None:
    fd = os.memfd_create("other")
    os.ftruncate(fd, HEADER_BYTES + LAYOUT.block_bytes)
    assert SharedPool.open(share_of(pool) | {"fd": fd}, LAYOUT.block_bytes) is None
    os.close(fd)
