"""The two ends of the hand-off measurement: a prefill side and a decode side without a model."""

from __future__ import annotations

import socket
import time
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import torch

from workers.native.handoff.offers import Offer, OfferTable
from workers.native.handoff.pull import Pull
from workers.native.handoff.reference import HandoffReference
from workers.native.handoff.server import HandoffServer
from workers.native.kv.layout import KvLayout
from workers.native.kv.pool import KvPool

if TYPE_CHECKING:
    from benchmarks.kv_transfer import Shape

_KEY = "weights=bench"
_LOGITS_BYTES = 49152 * 4  # one row of SmolLM2's vocabulary in float32


def _pool(shape: Shape) -> KvPool:
    layout = KvLayout(shape.layers, shape.kv_heads, shape.head_dim, torch.float32)
    pool = KvPool(layout, shape.blocks, torch.device("cpu"))
    pool.tensor.normal_()
    return pool


def serve_offers(control: Connection, shape: Shape) -> None:
    """Run the sending process: make an offer, or send raw bytes, whenever told to."""
    pool = _pool(shape)
    offers = OfferTable(30.0, time.monotonic)
    server = HandoffServer(offers, pool, _KEY, "127.0.0.1")
    server.start()
    raw = memoryview(bytearray(shape.blocks * pool.layout.block_bytes))
    raw[:] = bytes(len(raw))
    while (order := control.recv()) is not None:
        if order[0] == "raw":
            _send_raw(control, raw[: order[1]])
        else:
            control.send(_make_offer(offers, shape, server.port))
    server.stop()


def _make_offer(offers: OfferTable, shape: Shape, port: int) -> HandoffReference:
    offer = offers.make("prompt", shape.tokens, _ended)
    offer.publish(list(range(shape.blocks)))
    offer.finish(memoryview(bytes(_LOGITS_BYTES)))
    return HandoffReference(offer.offer_id, offer.key, "127.0.0.1", port)


def _ended(offer: Offer, reason: str) -> None:
    """The blocks are used again by the next offer; there is nothing to give back."""


def _send_raw(control: Connection, data: memoryview) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        control.send(listener.getsockname()[1])
        sock, _ = listener.accept()
        with sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.recv(1)
            sock.sendall(data)


class Receiver:
    """The decode side, in this process."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._pool = _pool(shape)
        self.size_bytes = shape.blocks * self._pool.layout.block_bytes

    def pull_seconds(self, control: Connection, *, shared: bool) -> float:
        """Pull one whole offer and return the time from connect to confirmation."""
        control.send(("offer",))
        reference: Any = control.recv()
        pull = Pull(
            reference,
            "prompt",
            self._shape.tokens,
            self._pool,
            _KEY,
            _LOGITS_BYTES,
            time.perf_counter,
            allow_shared=shared,
        )
        pull.begin(list(range(self._shape.blocks)), 0)
        started_s = time.perf_counter()
        pulled = pull.run()
        seconds = time.perf_counter() - started_s
        assert pulled.stats.shared is shared, "the other path was taken"
        return seconds
