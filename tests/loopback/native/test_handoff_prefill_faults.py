"""A prefill worker that dies, stalls or lies: the pull fails with the right error, always."""

import socket
import struct
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from workers.native.handoff.errors import (
    HandoffBroken,
    HandoffCorrupt,
    HandoffError,
    HandoffRefused,
)
from workers.native.handoff.frames import Kind, checksum, pack
from workers.native.handoff.reference import HandoffReference
from workers.native.testing.handoff_link import VOCABULARY, HandoffLink, Running
from workers.native.testing.scripted_prefill import Peer, Script, ScriptedPrefill
from workers.native.testing.waiting import open_files


def welcome(peer: Peer, **changes: int) -> None:
    peer.welcome(**changes)


def after_welcome(more: Callable[[Peer], object], *blocks: int) -> Script:
    """Behave up to BEGIN and the given blocks, then do `more`, then wait."""

    def script(peer: Peer) -> None:
        peer.welcome()
        peer.send_blocks(*blocks)
        more(peer)
        peer.wait_for_close()

    return script


def raw_block(peer: Peer, *, index: int = 0, cut: int = 0, flip: int = -1, digest: int = 0) -> None:
    data = bytearray(peer.pool.host_block(index))
    digest = checksum(data) ^ digest
    if flip >= 0:
        data[flip] ^= 1
    del data[len(data) - cut :]
    peer.sock.sendall(pack(Kind.BLOCK, index, len(data), digest) + data)


def logits(peer: Peer, count: int = VOCABULARY, digest: int = 0) -> None:
    body = b"\0" * (4 * count)
    peer.sock.sendall(pack(Kind.LOGITS, 0, len(body), checksum(body) ^ digest) + body)


def half_a_block(peer: Peer) -> None:
    data = bytes(peer.pool.host_block(0))
    peer.sock.sendall(pack(Kind.BLOCK, 0, len(data), checksum(data)) + data[:100])


def hang_up(peer: Peer) -> None:
    peer.sock.shutdown(socket.SHUT_RDWR)


def reset(peer: Peer) -> None:
    peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.sock.close()


def both(first: Callable[[Peer], object], second: Callable[[Peer], object]) -> Script:
    def do(peer: Peer) -> None:
        first(peer)
        second(peer)

    return do


def rewrite_then_announce(peer: Peer) -> None:
    """The block is another prompt's by the time the reader copies it."""
    digest = checksum(peer.pool.host_block(0))
    peer.pool.tensor[0] += 1
    peer.frames.send_shared(0, 0, digest)


def read_then(more: Callable[[Peer], object]) -> Script:
    """Hear HELLO, then do `more`, then wait."""

    def script(peer: Peer) -> None:
        peer.read()
        more(peer)
        peer.wait_for_close()

    return script


def say(kind: Kind, **fields: str) -> Callable[[Peer], object]:
    return lambda peer: peer.frames.send_control(kind, **fields)


def send(raw: bytes) -> Callable[[Peer], object]:
    return lambda peer: peer.sock.sendall(raw)


def share(number: int) -> Callable[[Peer], object]:
    return lambda peer: peer.frames.send_shared(0, number, 0)


ALL = (0, 1, 2, 3)
HTTP = b"HTTP/1.1 400 Bad Request\r\n\r\n" + b" " * 99
NOT_JSON = pack(Kind.WELCOME, 0, 2, checksum(b"{x")) + b"{x"
BIG = pack(Kind.WELCOME, 0, 1 << 40, 0)
block = partial(partial, raw_block)
some_logits = partial(partial, logits)
CORRUPT: dict[str, tuple[Script, str]] = {
    "is no worker": (read_then(send(HTTP)), "another service"),
    "welcome is no json": (read_then(send(NOT_JSON)), "WELCOME is not JSON"),
    "welcome is huge": (read_then(send(BIG)), "WELCOME of 1099511627776 bytes"),
    "wrong answer to hello": (read_then(say(Kind.IDLE)), "expected WELCOME"),
    "other block size": (partial(welcome, block_bytes=8), "expected"),
    "other prompt length": (partial(welcome, prompt_tokens=16), "expected"),
    "payload changed": (after_welcome(block(flip=77)), "checksum of BLOCK 0"),
    "last byte changed": (after_welcome(block(index=3, flip=1023), 0, 1, 2), "checksum of BLOCK 3"),
    "checksum changed": (after_welcome(block(digest=1)), "checksum of BLOCK 0"),
    "block too short": (after_welcome(block(cut=4)), "has 1020 bytes, not 1024"),
    "block skipped": (after_welcome(block(index=2), 0), "block 2 came out of order"),
    "block twice": (after_welcome(block(index=0), 0), "block 0 came out of order"),
    "too many blocks": (after_welcome(block(index=4), *ALL), "block 4 came out of order"),
    "logits too early": (after_welcome(logits, 0, 1), "2 blocks came, 4 were due"),
    "logits too short": (after_welcome(some_logits(count=VOCABULARY - 1), *ALL), "has 196 bytes"),
    "logits too long": (after_welcome(some_logits(count=VOCABULARY + 1), *ALL), "has 204 bytes"),
    "no logits": (after_welcome(some_logits(count=0), *ALL), "has 0 bytes"),
    "logits changed": (after_welcome(some_logits(digest=1), *ALL), "checksum of LOGITS"),
    "magic is wrong": (after_welcome(send(b"\0" * 32), 0), "not a hand-off frame"),
    "frame out of turn": (after_welcome(say(Kind.BEGIN)), "unexpected BEGIN"),
    "shared block outside": (after_welcome(share(6)), "block 6 of 6"),
    "shared block far outside": (after_welcome(share(2**64 - 1)), "of 6"),
    "shared block overwritten": (
        after_welcome(rewrite_then_announce),
        "checksum of shared block 0",
    ),
}
EARLY = "closed the connection early"
BROKEN: dict[str, tuple[Script, str]] = {
    "closes at hello": (hang_up, EARLY),
    "closes before blocks": (after_welcome(hang_up), EARLY),
    "closes in a block": (after_welcome(both(half_a_block, hang_up)), EARLY),
    "closes before logits": (after_welcome(hang_up, *ALL), EARLY),
    "resets in a block": (both(welcome, both(half_a_block, reset)), "the peer"),
    "prefill failed": (after_welcome(say(Kind.FAILED, message="x y"), 0), "prefill failed: x y"),
}
REFUSED: dict[str, tuple[Script, str]] = {
    "refuses": (read_then(say(Kind.REFUSED, message="not today")), "not today"),
}
FAULTS = [
    pytest.param(script, kind, text, id=name)
    for kind, faults in (
        (HandoffCorrupt, CORRUPT),
        (HandoffBroken, BROKEN),
        (HandoffRefused, REFUSED),
    )
    for name, (script, text) in faults.items()
]


@pytest.fixture
def untouched(link: HandoffLink) -> Iterator[None]:
    """Blocks that are not the pull's keep their content, whatever a peer does."""
    guards = sorted({*range(link.decode.blocks)} - {*link.targets()})
    link.decode.tensor.copy_(torch.randn(link.decode.tensor.shape))
    before = link.decode.tensor[guards].clone()
    yield
    assert guards
    assert torch.equal(link.decode.tensor[guards], before)


def pull_through(link: HandoffLink, script: Script, **changes: object) -> HandoffError:
    with ScriptedPrefill(link.prefill, script) as peer:
        return Running(link.pull_from(peer.reference, **changes)).failure()  # type: ignore[arg-type]


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("script,kind,text", FAULTS)
def test_faults(link: HandoffLink, script: Script, kind: type[HandoffError], text: str) -> None:
    error = pull_through(link, script)
    assert type(error) is kind, repr(error)
    assert text in str(error)


def test_the_script_itself_is_right(link: HandoffLink) -> None:
    def honest(peer: Peer) -> None:
        begin = peer.welcome()
        assert begin == {"start_block": 0, "shared": True}
        peer.frames.send_control(Kind.IDLE)
        peer.send_blocks(0, 1)
        peer.frames.send_shared(2, 2, checksum(peer.pool.host_block(2)))
        peer.frames.send_control(Kind.IDLE)
        peer.send_blocks(3)
        logits(peer)
        assert peer.read() == (Kind.DONE, {})

    with ScriptedPrefill(link.prefill, honest) as peer:
        Running(link.pull_from(peer.reference)).result()
    assert all(link.arrived(number) for number in range(4))


def test_a_kept_error_keeps_no_memory_of_the_peer(link: HandoffLink) -> None:
    before = open_files()
    error = pull_through(link, after_welcome(share(6)))
    assert open_files() == before, repr(error)


def test_a_shared_block_that_was_not_asked_for(link: HandoffLink) -> None:
    script = after_welcome(lambda p: p.frames.send_shared(0, 0, checksum(p.pool.host_block(0))))
    error = pull_through(link, script, allow_shared=False)
    assert isinstance(error, HandoffCorrupt)
    assert "where none was asked for" in str(error)


@pytest.mark.parametrize("share", [None, "x", [], {}, {"pid": 1, "fd": 0, "token": "00"}], ids=str)
def test_a_share_that_is_none_is_answered_by_tcp(link: HandoffLink, share: object) -> None:
    def script(peer: Peer) -> None:
        assert peer.welcome(share=share)["shared"] is False
        peer.send_blocks(0, 1, 2, 3)
        logits(peer)
        assert peer.read()[0] is Kind.DONE

    with ScriptedPrefill(link.prefill, script) as peer:
        assert not Running(link.pull_from(peer.reference)).result().stats.shared
    assert all(link.arrived(number) for number in range(4))


SILENT: dict[str, Script] = {
    "at hello": Peer.wait_for_close,
    "before blocks": after_welcome(lambda peer: None),
    "in a block": after_welcome(half_a_block),
    "before logits": after_welcome(lambda peer: None, 0, 1, 2, 3),
}  # fmt: skip


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("script", SILENT.values(), ids=SILENT)
def test_silence(link: HandoffLink, script: Script) -> None:
    error = pull_through(link, script, timeout_s=0.05)
    assert isinstance(error, HandoffBroken)
    assert "silent for 0.05 s" in str(error)


def test_nobody_there(link: HandoffLink) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    error = Running(link.pull_from(HandoffReference("i", "k", "127.0.0.1", port))).failure()
    assert isinstance(error, HandoffBroken)
    assert f"cannot reach the prefill worker at 127.0.0.1:{port}" in str(error)
