"""What a vLLM server says of its prefix cache over ZMQ (`--kv-events-config`).

Three frames: topic, sequence number (8 bytes, big endian), and a MessagePack list of time, events
and data-parallel rank. Blocks have the engine's own names there, so all that can be used of them is
how much was let go; the engine lets the least recently used go first, as the router's picture does.

Needs pyzmq, which the extra `vllm` installs.
"""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass
from typing import Any

import msgspec

log = logging.getLogger("splitserve.vllm")

_HELD_MESSAGES = 100_000
_MESSAGES_A_TIME = 2_000  # one drain must not hold up the event loop
_DEVICE = (None, "GPU")


@dataclass(frozen=True, slots=True)
class CacheLosses:
    """What is gone since the server was first listened to: tokens, and how often all of it."""

    removed_tokens: int = 0
    cleared: int = 0


class _Event(msgspec.Struct):
    type: str
    block_hashes: list[Any] = []
    block_size: int = 0
    medium: str | None = None


class _Batch(msgspec.Struct, array_like=True):
    time: float
    events: list[_Event]


class KvEvents:
    """Listens to one server. The socket is closed with it."""

    def __init__(self, address: str, block_tokens: int) -> None:
        """Begin to listen at host:port. Raises ImportError without pyzmq."""
        import zmq  # noqa: PLC0415  # optional, and of no use without kv_events

        self._again = zmq.Again
        self._no_wait = zmq.NOBLOCK
        context = zmq.Context()
        self._socket = context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.IPV6, 1)
        self._socket.setsockopt(zmq.RCVHWM, _HELD_MESSAGES)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(f"tcp://{address}")
        weakref.finalize(self, context.destroy, 0)
        self._decoder = msgspec.msgpack.Decoder(_Batch)
        self._block_tokens = block_tokens
        self._next: int | None = None
        self._losses = CacheLosses()

    def losses(self) -> CacheLosses:
        """Take in what has come, without waiting, and return all losses so far."""
        for _ in range(_MESSAGES_A_TIME):
            try:
                frames = self._socket.recv_multipart(self._no_wait)
            except self._again:
                break
            try:
                self._see(frames)
            except (ValueError, msgspec.DecodeError) as error:
                log.warning("a KV event that cannot be read: %s; update splitserve", error)
                self._clear()
        return self._losses

    def _see(self, frames: list[bytes]) -> None:
        _, number, payload = frames
        sequence = int.from_bytes(number, "big")
        if self._next is not None and sequence != self._next:
            self._clear()  # some were missed, and with them what was removed
        self._next = sequence + 1
        for event in self._decoder.decode(payload).events:
            if event.type == "AllBlocksCleared":
                self._clear()
            elif event.type == "BlockRemoved" and event.medium in _DEVICE:
                self._remove(len(event.block_hashes))
            elif event.type == "BlockStored" and event.block_size > 0:
                self._block_tokens = event.block_size

    def _remove(self, blocks: int) -> None:
        known = self._losses
        tokens = known.removed_tokens + blocks * self._block_tokens
        self._losses = CacheLosses(tokens, known.cleared)

    def _clear(self) -> None:
        known = self._losses
        self._losses = CacheLosses(known.removed_tokens, known.cleared + 1)
