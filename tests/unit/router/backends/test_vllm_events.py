"""KV events over a real socket, as vLLM publishes them."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq

from router.backends.vllm_events import CacheLosses, KvEvents

TIMEOUT_MS = 5000


class Publisher:
    """The server's side."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self._socket = context.socket(zmq.XPUB)  # it hears of who listens
        self._port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.sequence = 0
        self.events = KvEvents(f"127.0.0.1:{self._port}", 16)
        assert self._socket.poll(TIMEOUT_MS), "nobody listens"
        self._socket.recv()

    def send(self, *events: dict[str, Any], raw: bytes | None = None) -> None:
        payload = msgspec.msgpack.encode([1.5, list(events), 0]) if raw is None else raw
        self._socket.send_multipart([b"kv", self.sequence.to_bytes(8, "big"), payload])
        self.sequence += 1

    def losses(self) -> CacheLosses:
        assert self.events._socket.poll(TIMEOUT_MS), "nothing came"
        return self.events.losses()


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    context = zmq.Context()
    yield Publisher(context)
    context.destroy(0)


def removed(count: int, medium: str | None = "GPU") -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(range(count)), "medium": medium}


def stored(block_tokens: int) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": [b"\x01" * 32],
        "parent_block_hash": None,
        "token_ids": list(range(block_tokens)),
        "block_size": block_tokens,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }


def test_removed_blocks_are_counted_in_tokens(publisher: Publisher) -> None:
    publisher.send(removed(3), removed(2, "CPU"), removed(1, None))
    assert publisher.losses() == CacheLosses(4 * 16, 0)
    assert publisher.events.losses() == CacheLosses(4 * 16, 0)  # nothing has come


def test_the_server_says_how_large_its_blocks_are(publisher: Publisher) -> None:
    publisher.send(stored(128), removed(2), {"type": "OfTheFuture", "x": 1})
    assert publisher.losses() == CacheLosses(256, 0)


def test_a_cleared_cache_is_told(publisher: Publisher) -> None:
    publisher.send({"type": "AllBlocksCleared"})
    assert publisher.losses() == CacheLosses(0, 1)


def test_messages_that_were_missed_may_have_removed_anything(publisher: Publisher) -> None:
    publisher.send(removed(1))
    assert publisher.losses() == CacheLosses(16, 0)
    publisher.sequence += 1
    publisher.send(removed(1))
    assert publisher.losses() == CacheLosses(32, 1)


def test_a_server_that_begins_anew_is_noticed(publisher: Publisher) -> None:
    publisher.send(stored(16))
    publisher.send(stored(16))
    publisher.sequence = 0
    publisher.send(stored(16))
    while publisher.events._next != 1:
        publisher.losses()
    assert publisher.events.losses().cleared == 1


@pytest.mark.parametrize(
    "raw", [b"", b"\xc1", msgspec.msgpack.encode([1.5, [["BlockRemoved"]], 0])]
)
def test_what_cannot_be_read_may_have_been_anything(publisher: Publisher, raw: bytes) -> None:
    publisher.send(raw=raw)
    assert publisher.losses() == CacheLosses(0, 1)
