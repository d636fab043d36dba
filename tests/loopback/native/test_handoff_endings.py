"""Cancel, release, expiry, failure and shutdown in every phase of a hand-off."""

import fcntl
import socket
import sys
import termios
import threading
from collections.abc import Callable
from typing import Literal

import pytest

from workers.native.handoff import pull as pull_side
from workers.native.handoff import server as server_side
from workers.native.handoff.errors import HandoffBroken, HandoffRefused
from workers.native.handoff.frames import Kind, pack
from workers.native.handoff.offers import Offer
from workers.native.handoff.pull import Pull
from workers.native.handoff.reference import HandoffReference
from workers.native.testing.handoff_link import HandoffLink, Running
from workers.native.testing.scripted_prefill import Peer, ScriptedPrefill
from workers.native.testing.waiting import thread_names, until

Phase = Literal["room", "nothing", "a block", "all blocks"]
PHASES = ("room", "nothing", "a block", "all blocks")
each_phase = pytest.mark.parametrize("phase", PHASES)
shared_or_not = pytest.mark.parametrize("shared", [True, False], ids=["shared", "tcp"])


@pytest.fixture(autouse=True)
def quick_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull_side, "_HEARTBEAT_S", 0.01)
    monkeypatch.setattr(server_side, "_HEARTBEAT_S", 0.01)


def begin(link: HandoffLink, phase: Phase, shared: bool = True) -> tuple[Offer, Running]:
    """Bring a hand-off to where it waits: for room, or for blocks or logits after some blocks."""
    offer = link.offer()
    pull = link.pull(offer, start=None if phase == "room" else 0, allow_shared=shared)
    running = Running(pull)
    until(lambda: offer.reading, "the offer is claimed")
    count = {"room": 4, "nothing": 0, "a block": 1, "all blocks": 4}[phase]
    offer.publish(list(range(count)))
    if phase not in ("room", "nothing"):
        until(lambda: link.arrived(count - 1), "the blocks arrive")
    return offer, running


def assert_ended(link: HandoffLink, reason: str) -> None:
    assert link.ended.wait(5)
    until(lambda: thread_names("handoff-reader") == [], "the reader's thread ends")
    assert link.ends == [reason]
    assert link.offers.ended == {reason: 1}
    assert link.offers.live == 0


@shared_or_not
@each_phase
def test_cancel(link: HandoffLink, phase: Phase, shared: bool) -> None:
    _, running = begin(link, phase, shared)
    running.pull.cancel()
    assert isinstance(running.failure(), HandoffBroken)
    running.pull.cancel()  # again, when all is over
    assert_ended(link, "peer lost")


def test_cancel_before_it_runs(link: HandoffLink) -> None:
    offer = link.offer()
    link.finish(offer)
    pull = link.pull(offer)
    pull.cancel()
    assert isinstance(Running(pull).failure(), HandoffBroken)
    until(lambda: thread_names("handoff-reader") == [], "the reader's thread ends")
    assert not link.arrived(0)


def test_cancel_after_it_is_done(link: HandoffLink) -> None:
    offer = link.offer()
    link.finish(offer)
    running = Running(link.pull(offer))
    running.result()
    running.pull.cancel()
    assert_ended(link, "read")


def test_cancel_while_the_peer_does_not_even_answer(link: HandoffLink) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:  # the kernel accepts, nobody reads
        reference = HandoffReference("i", "k", "127.0.0.1", deaf.getsockname()[1])
        running = Running(link.pull_from(reference, timeout_s=60.0))
        until(lambda: running.pull._frames is not None, "it is connected")
        running.pull.cancel()
        assert isinstance(running.failure(), HandoffBroken)


def test_cancel_in_the_middle_of_a_block(link: HandoffLink) -> None:
    halfway = threading.Event()

    def script(peer: Peer) -> None:
        peer.welcome()
        data = bytes(peer.pool.host_block(0))
        peer.sock.sendall(pack(Kind.BLOCK, 0, len(data), 0) + data[:100])
        halfway.set()
        peer.wait_for_close()

    with ScriptedPrefill(link.prefill, script) as peer:
        running = Running(link.pull_from(peer.reference, timeout_s=60.0))
        assert halfway.wait(5)
        running.pull.cancel()
        assert isinstance(running.failure(), HandoffBroken)


def test_cancel_while_the_sender_is_stuck(make_link: Callable[..., HandoffLink]) -> None:
    link = make_link(head_dim=65536, blocks=4)
    inside, go_on = threading.Event(), threading.Event()

    class Slow(Pull):
        """Takes its time before it reads a block, so that the sender's buffers are full."""

        def _fill(self, *arguments: object) -> None:
            inside.set()
            assert go_on.wait(10)
            super()._fill(*arguments)  # type: ignore[arg-type]

    offer = link.offer()
    link.finish(offer)
    pull = link.pull(offer, allow_shared=False)
    slow = Slow(**{name: getattr(pull, name) for name in Pull.__dataclass_fields__})
    running = Running(slow)
    assert inside.wait(5)
    assert slow._frames is not None
    sock = slow._frames._socket
    readings: list[int] = []

    def stuck() -> bool:
        raw = fcntl.ioctl(sock, termios.FIONREAD, b"\0" * 4)
        readings.append(int.from_bytes(raw, sys.byteorder))
        return len(readings) > 20 and len(set(readings[-20:])) == 1

    until(stuck, "the sender has filled all buffers")
    slow.cancel()
    go_on.set()
    assert isinstance(running.failure(), HandoffBroken)
    assert_ended(link, "peer lost")


@each_phase
def test_release(link: HandoffLink, phase: Phase) -> None:
    offer, running = begin(link, phase)
    assert link.offers.release(offer.offer_id)
    error = running.failure()
    assert isinstance(error, HandoffBroken)
    if phase != "room":
        assert str(error) == "prefill failed: released"
    assert_ended(link, "released")
    assert not link.offers.release(offer.offer_id)


@each_phase
def test_a_prefill_that_fails(link: HandoffLink, phase: Phase) -> None:
    offer, running = begin(link, phase)
    offer.fail("the step failed: no memory")
    error = running.failure()
    assert isinstance(error, HandoffBroken)
    if phase != "room":
        assert str(error) == "prefill failed: the step failed: no memory"
    assert link.ended.wait(5)
    assert link.ends == ["the step failed: no memory"]
    assert link.offers.ended == {"the step failed": 1}


@shared_or_not
@each_phase
def test_shutdown(link: HandoffLink, phase: Phase, shared: bool) -> None:
    _, running = begin(link, phase, shared)
    link.server.stop()
    assert isinstance(running.failure(), HandoffBroken)
    assert_ended(link, "shutdown")
    error = Running(link.pull(link.offer())).failure()
    assert "cannot reach the prefill worker" in str(error)
    link.offers.end_all("shutdown")


@each_phase
def test_a_lease_ends_only_what_nobody_reads(link: HandoffLink, phase: Phase) -> None:
    offer, running = begin(link, phase)
    forgotten = link.offer()
    link.now_s = 29.9
    assert link.offers.expire() == 0
    link.now_s = 30.0
    assert link.offers.expire() in (0, 1)  # the port's own thread looks too
    until(lambda: link.ends == ["expired"], "the lease ends")
    assert isinstance(Running(link.pull(forgotten)).failure(), HandoffRefused)
    running.pull.begin(link.targets(), 0)
    link.finish(offer)
    running.result()
    until(lambda: link.ends == ["expired", "read"], "the other is read")


@pytest.mark.parametrize("published", [0, 2, 4])
@pytest.mark.parametrize("how", ["release", "fail", "expire", "shutdown"])
def test_an_offer_that_nobody_read(link: HandoffLink, how: str, published: int) -> None:
    offer = link.offer()
    offer.publish(list(range(published)))
    if how == "release":
        link.offers.release(offer.offer_id)
    elif how == "fail":
        offer.fail("fail")
        offer.fail("again")
    elif how == "shutdown":
        link.server.stop()
    link.now_s = 31.0
    link.offers.expire()
    reason = {"release": "released", "expire": "expired"}.get(how, how)
    assert_ended(link, reason)
    if how != "shutdown":
        error = Running(link.pull(offer)).failure()
        assert isinstance(error, HandoffRefused)
    link.finish(offer)  # prefill did not know yet: harmless
    offer.end("late")
    assert link.ends == [reason]


def test_shutdown_cuts_a_caller_that_said_nothing(link: HandoffLink) -> None:
    with socket.create_connection((link.host, link.server.port), 5) as silent:
        until(lambda: thread_names("handoff-reader") != [], "it is accepted")
        link.server.stop()
        assert silent.recv(1) == b""
