"""What the prefill side refuses, what it survives, and when it lets go of KV."""

import contextlib
import errno
import socket
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from workers.native.handoff import pull as pull_side
from workers.native.handoff import server as server_side
from workers.native.handoff.errors import (
    HandoffBroken,
    HandoffCorrupt,
    HandoffError,
    HandoffRefused,
)
from workers.native.handoff.frames import FrameSocket, Kind, checksum, pack
from workers.native.handoff.offers import Offer
from workers.native.testing.handoff_link import PAIRING, HandoffLink, Running
from workers.native.testing.waiting import thread_names, until


@pytest.fixture(autouse=True)
def quick_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull_side, "_HEARTBEAT_S", 0.01)
    monkeypatch.setattr(server_side, "_HEARTBEAT_S", 0.01)


def with_reference(link: HandoffLink, offer: Offer, **changes: Any) -> Running:
    pull = link.pull(offer)
    return Running(replace(pull, reference=replace(pull.reference, **changes)))


def still_good(link: HandoffLink, offer: Offer) -> None:
    """The offer was not hurt by what came before."""
    assert link.ends == []
    Running(link.pull(offer)).result()
    assert link.ended.wait(5)
    assert link.ends == ["read"]


@pytest.mark.parametrize(
    "changes",
    [
        {"key": "wrong"},
        {"key": ""},
        {"key": "kéy"},
        {"offer_id": "unknown"},
        {"offer_id": "\ud800"},
    ],
    ids=str,
)
def test_wrong_id_or_key(link: HandoffLink, changes: dict[str, str]) -> None:
    offer = link.offer()
    link.finish(offer)
    error = with_reference(link, offer, **changes).failure()
    assert isinstance(error, HandoffRefused)
    assert "prefill again" in str(error)
    still_good(link, offer)


def test_another_prompt_another_model_another_size(link: HandoffLink) -> None:
    offer = link.offer()
    link.finish(offer)
    cases: list[tuple[dict[str, Any], type[HandoffError], str]] = [
        ({"prompt_hash": "0" * 32}, HandoffRefused, "another prompt"),
        ({"pairing_key": "weights=other"}, HandoffRefused, "KV differs"),
    ]
    for changes, kind, text in cases:
        error = Running(link.pull(offer, **changes)).failure()
        assert type(error) is kind
        assert text in str(error)
    still_good(link, offer)


def test_a_prompt_of_another_length_is_noticed_by_the_reader(link: HandoffLink) -> None:
    offer = link.offer()
    error = Running(replace(link.pull(offer), prompt_tokens=16)).failure()
    assert isinstance(error, HandoffCorrupt)
    assert link.ended.wait(5)
    assert link.ends == ["peer lost"]


def test_one_offer_serves_one_reader(link: HandoffLink) -> None:
    offer = link.offer()
    first = Running(link.pull(offer))
    until(lambda: offer.reading, "the offer is claimed")
    error = Running(link.pull(offer)).failure()
    assert isinstance(error, HandoffRefused)
    assert "is taken" in str(error)
    link.finish(offer)
    first.result()
    until(lambda: link.ends == ["read"], "the offer ends once")
    assert isinstance(Running(link.pull(offer)).failure(), HandoffRefused)
    assert link.ends == ["read"]


def bare(link: HandoffLink) -> socket.socket:
    return socket.create_connection((link.host, link.server.port), 5)


def hello(offer: Offer, **changes: Any) -> dict[str, Any]:
    told = {
        "version": 1,
        "id": offer.offer_id,
        "key": offer.key,
        "pairing": PAIRING,
        "prompt_hash": offer.prompt_hash,
    }
    return told | changes


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_another_protocol_version(link: HandoffLink, version: object) -> None:
    offer = link.offer()
    link.finish(offer)
    frames = FrameSocket(bare(link), 5)
    frames.send_control(Kind.HELLO, **hello(offer, version=version))
    header = frames.read_header()
    assert header.kind is Kind.REFUSED
    assert "run the same splitserve on both" in frames.read_control(header)["message"]
    frames.close()
    still_good(link, offer)


NESTED = b"[" * 60_000
JUNK = {
    "nothing": b"",
    "half a header": b"SSKV",
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b" " * 40,
    "unknown kind": struct.pack("<4sIQQQ", b"SSKV", 99, 0, 0, 0),
    "wrong first frame": pack(Kind.WAIT, 0, 0, 0),
    "huge hello": pack(Kind.HELLO, 0, 2**63, 0),
    "wrong checksum": pack(Kind.HELLO, 0, 2, 5) + b"{}",
    "no json": pack(Kind.HELLO, 0, 3, checksum(b"{]}")) + b"{]}",
    "no object": pack(Kind.HELLO, 0, 2, checksum(b"[]")) + b"[]",
    "empty object": pack(Kind.HELLO, 0, 2, checksum(b"{}")) + b"{}",
    "nested": pack(Kind.HELLO, 0, len(NESTED), checksum(NESTED)) + NESTED,
    "not utf-8": pack(Kind.HELLO, 0, 3, checksum(b'"\xff"')) + b'"\xff"',
}


@pytest.mark.parametrize("junk", JUNK.values(), ids=JUNK)
def test_junk_on_the_port(link: HandoffLink, junk: bytes) -> None:
    offer = link.offer()
    link.finish(offer)
    with bare(link) as sock:
        with contextlib.suppress(OSError):  # it may close without reading everything
            sock.sendall(junk)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(4096):  # at most a refusal, then the end
                pass
    still_good(link, offer)


@pytest.mark.parametrize(
    "begin",
    [{}, {"start_block": -1}, {"start_block": "0"}, {"start_block": None}, {"start_block": 0.5}],
    ids=str,
)
def test_a_reader_that_asks_for_nonsense_ends_its_offer(
    link: HandoffLink, begin: dict[str, Any]
) -> None:
    offer = link.offer()
    link.finish(offer)
    frames = FrameSocket(bare(link), 5)
    frames.send_control(Kind.HELLO, **hello(offer))
    frames.read_control(frames.read_header())
    frames.send_control(Kind.BEGIN, shared=False, **begin)
    with pytest.raises(HandoffBroken):
        frames.read_header()
    frames.close()
    assert link.ended.wait(5)
    assert link.ends == ["peer lost"]


@pytest.mark.parametrize("kind", [Kind.HELLO, Kind.DONE, Kind.BLOCK])
def test_a_reader_that_speaks_out_of_turn(link: HandoffLink, kind: Kind) -> None:
    offer = link.offer()
    frames = FrameSocket(bare(link), 5)
    frames.send_control(Kind.HELLO, **hello(offer))
    frames.read_control(frames.read_header())
    frames.send_control(kind)
    with pytest.raises(HandoffBroken):
        frames.read_header()
    frames.close()
    until(lambda: link.ends == ["peer lost"], "the offer ends")


@pytest.mark.parametrize("sends", ["hello", "begin", "all"])
def test_a_reader_that_falls_silent(
    make_link: Callable[..., HandoffLink], monkeypatch: pytest.MonkeyPatch, sends: str
) -> None:
    monkeypatch.setattr(server_side, "PEER_TIMEOUT_S", 0.1)
    link = make_link(head_dim=65536, blocks=4)  # 8 MiB a block: more than any socket buffers
    offer = link.offer()
    frames = FrameSocket(bare(link), 5)
    frames.send_control(Kind.HELLO, **hello(offer))
    frames.read_control(frames.read_header())
    if sends != "hello":
        frames.send_control(Kind.BEGIN, start_block=0 if sends == "begin" else 4, shared=False)
    link.finish(offer)
    assert link.ended.wait(5)  # before the lease, by far
    assert link.ends == ["peer lost"]
    frames.close()


@pytest.mark.parametrize("after", ["welcome", "begin", "a block", "half a block"])
def test_a_reader_that_dies(make_link: Callable[..., HandoffLink], after: str) -> None:
    link = make_link(head_dim=4096, blocks=4)
    offer = link.offer()
    offer.publish([0])
    sock = bare(link)
    frames = FrameSocket(sock, 5)
    frames.send_control(Kind.HELLO, **hello(offer))
    frames.read_control(frames.read_header())
    if after != "welcome":
        frames.send_control(Kind.BEGIN, start_block=0, shared=False)
    if after == "a block":
        frames.read_into(
            frames.read_header(), memoryview(bytearray(link.prefill.layout.block_bytes))
        )
    elif after == "half a block":
        frames.read_header()
        sock.recv(1000)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # as a crash does
    sock.close()
    link.finish(offer)
    assert link.ended.wait(5)
    assert link.ends == ["peer lost"]


def test_no_more_readers_than_allowed(
    make_link: Callable[..., HandoffLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_side, "_MAX_READERS", 2)
    link = make_link()
    offers = [link.offer() for _ in range(3)]
    running = [Running(link.pull(offer)) for offer in offers[:2]]
    until(lambda: all(offer.reading for offer in offers[:2]), "two read")
    assert isinstance(Running(link.pull(offers[2])).failure(), HandoffBroken)
    for offer in offers:
        link.finish(offer)
    for each in running:
        each.result()
    until(lambda: thread_names("handoff-reader") == [], "the readers' threads end")
    Running(link.pull(offers[2])).result()
    until(lambda: link.ends == ["read"] * 3, "all are read")


class FailingListener:
    """A listening socket whose first `accept`s fail."""

    def __init__(self, real: socket.socket, failures: list[int]) -> None:
        self._real, self._failures = real, failures

    def accept(self) -> Any:
        if self._failures:
            raise OSError(self._failures.pop(), "as told")
        return self._real.accept()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def test_the_port_outlives_failed_accepts(
    make_link: Callable[..., HandoffLink], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_side, "_RETRY_S", 0.01)
    link = make_link(start=False)
    failures = [errno.EMFILE, errno.ECONNABORTED]
    link.server._listener = FailingListener(link.server._listener, failures)  # type: ignore[assignment]
    link.server.start()
    offer = link.offer()
    link.finish(offer)
    still_good(link, offer)
    assert failures == []
