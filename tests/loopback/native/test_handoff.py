"""Hand-offs that succeed, over TCP and through shared memory."""

import socket
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from workers.native.handoff import pull as pull_side
from workers.native.handoff import server as server_side
from workers.native.handoff.frames import FrameSocket, Header
from workers.native.handoff.reference import HandoffReference
from workers.native.kv.pool import KvPool
from workers.native.testing.handoff_link import HandoffLink, Running
from workers.native.testing.waiting import until

shared_or_not = pytest.mark.parametrize("shared", [True, False], ids=["shared", "tcp"])


@pytest.fixture(autouse=True)
def quick_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull_side, "_HEARTBEAT_S", 0.01)
    monkeypatch.setattr(server_side, "_HEARTBEAT_S", 0.01)


@shared_or_not
@pytest.mark.parametrize("start", [0, 1, 3, 4])
@pytest.mark.parametrize("prompt_tokens", [13, 16])
def test_everything_arrives(
    link: HandoffLink, shared: bool, start: int, prompt_tokens: int
) -> None:
    offer = link.offer(prompt_tokens)
    link.finish(offer)
    untouched = link.decode.tensor.clone()
    done = Running(link.pull(offer, start=start, allow_shared=shared)).result()
    blocks = link.prefill.layout.blocks_for(prompt_tokens)
    for number in range(blocks):
        assert link.arrived(number, prompt_tokens) == (number >= start)
    for block in {*range(link.decode.blocks)} - {*link.targets(prompt_tokens)[start:]}:
        assert torch.equal(link.decode.tensor[block], untouched[block])
    assert bytes(done.logits) == link.raw_logits
    moved_bytes = (blocks - start) * link.prefill.layout.block_bytes
    assert done.stats.blocks == blocks - start
    assert done.stats.moved_bytes == moved_bytes + len(done.logits)
    assert done.stats.shared == shared
    assert done.stats.transfer_s >= 0
    assert link.ended.wait(5)
    assert link.ends == ["read"]
    assert link.offers.ended == {"read": 1}
    assert link.server.sent_bytes == moved_bytes


@shared_or_not
def test_blocks_move_while_prefill_runs(link: HandoffLink, shared: bool) -> None:
    offer = link.offer(prompt_tokens=24)
    running = Running(link.pull(offer, allow_shared=shared))
    until(lambda: offer.reading, "the offer is claimed")
    for number in range(6):
        assert not link.arrived(number, 24)
        offer.publish([number])
        until(lambda at=number: link.arrived(at, 24), f"block {number} arrives")  # type: ignore[misc]
    link.now_s = 1e9  # a lease that ran out matters to nobody who reads
    assert link.offers.expire() == 0
    link.finish(offer)
    assert running.result().stats.blocks == 6
    assert link.ended.wait(5)
    assert link.ends == ["read"]


@shared_or_not
def test_a_decode_worker_may_wait_for_room(link: HandoffLink, shared: bool) -> None:
    offer = link.offer()
    pull = link.pull(offer, start=None, allow_shared=shared)
    beats = threading.Semaphore(0)

    class Counting(FrameSocket):
        def read_header(self) -> Header:
            header = super().read_header()
            beats.release()
            return header

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_side, "FrameSocket", Counting)
        running = Running(pull)
        link.finish(offer)
        for _ in range(4):  # HELLO and three WAIT
            assert beats.acquire(timeout=5)
    assert not link.arrived(0)
    pull.begin(link.targets(), 0)
    running.result()
    assert all(link.arrived(number) for number in range(4))


def test_many_at_once(make_link: Callable[..., HandoffLink]) -> None:
    link = make_link(blocks=32)
    running = []
    for at in range(8):
        offer = link.offer()
        offer.publish(range(at * 4, at * 4 + 4))  # type: ignore[arg-type]
        pull = link.pull(offer, start=None, allow_shared=at % 2 == 0)
        pull.begin(list(range(at * 4, at * 4 + 4)), 0)
        running.append((Running(pull), offer))
    for each, offer in running:
        offer.finish(memoryview(link.raw_logits))
        each.result()
    assert torch.equal(link.decode.tensor, link.prefill.tensor)
    until(lambda: link.ends == ["read"] * 8, "all offers end")


def test_large_blocks_in_many_pieces(make_link: Callable[..., HandoffLink]) -> None:
    link = make_link(head_dim=16384, blocks=4)  # 2 MiB each
    offer = link.offer()
    link.finish(offer)
    assert Running(link.pull(offer, allow_shared=False)).result().stats.moved_bytes > 8 << 20
    assert all(link.arrived(number) for number in range(4))


class StagedPool(KvPool):
    """Behaves as a pool on a device that is not the CPU: blocks are copied in and out."""

    @property
    def in_host_memory(self) -> bool:
        return False

    def host_block(self, block: int) -> memoryview:
        raise AssertionError("not in host memory")


@shared_or_not
def test_a_pool_on_another_device_is_filled_through_a_copy(link: HandoffLink, shared: bool) -> None:
    staged = StagedPool(link.decode.layout, link.decode.blocks, torch.device("cpu"))
    offer = link.offer()
    link.finish(offer)
    Running(link.pull(offer, allow_shared=shared, pool=staged)).result()
    for number, block in enumerate(link.targets()):
        assert torch.equal(staged.tensor[block], link.prefill.tensor[number])
    staged.close()


def test_over_ipv6(make_link: Callable[..., HandoffLink]) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    link = make_link(host="::1")
    offer = link.offer()
    link.finish(offer)
    Running(link.pull(offer)).result()
    assert all(link.arrived(number) for number in range(4))


def test_a_reference_survives_its_trip_in_a_header() -> None:
    reference = HandoffReference("id", "kéy\N{SNOWMAN}", "::1", 65535)
    word = reference.encode()
    assert word.isascii()
    assert " " not in word
    assert HandoffReference.decode(word) == reference
    assert HandoffReference.decode(replace(reference, port=1).encode()).port == 1
