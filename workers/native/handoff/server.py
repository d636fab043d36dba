"""The prefill side: a listening socket, and one thread per decode worker that reads an offer."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from typing import Any

from workers.native.handoff.errors import HandoffBroken, HandoffError, HandoffRefused
from workers.native.handoff.frames import VERSION, FrameSocket, Kind, checksum
from workers.native.handoff.offers import Offer, OfferTable
from workers.native.kv.pool import KvPool

log = logging.getLogger("splitserve.handoff")

PEER_TIMEOUT_S = 10.0
_HEARTBEAT_S = 1.0
_RETRY_S = 0.2
_MAX_READERS = 128


class HandoffServer:
    """Serves the offers of `table` out of `pool` to whoever holds an offer's key."""

    def __init__(self, table: OfferTable, pool: KvPool, pairing_key: str, host: str) -> None:
        self._table = table
        self._pool = pool
        self._pairing_key = pairing_key
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=_MAX_READERS)
        self.port: int = self._listener.getsockname()[1]
        self._slots = threading.BoundedSemaphore(_MAX_READERS)
        self._stopping = threading.Event()
        self._open: set[FrameSocket] = set()
        self._open_lock = threading.Lock()
        self.sent_bytes = 0
        self._threads = [
            threading.Thread(target=self._accept, name="handoff-accept", daemon=True),
            threading.Thread(target=self._sweep, name="handoff-leases", daemon=True),
        ]

    def start(self) -> None:
        """Begin to accept readers and to end stale leases."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Refuse new readers, end every offer, cut the present readers."""
        self._stopping.set()
        with contextlib.suppress(OSError):  # some systems refuse; closing is enough there
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._table.end_all("shutdown")  # first, so that this is the reason and not a lost peer
        with self._open_lock:
            readers = list(self._open)
        for reader in readers:
            reader.interrupt()

    def _sweep(self) -> None:
        while not self._stopping.wait(_HEARTBEAT_S):
            self._table.expire()

    def _accept(self) -> None:
        while not self._stopping.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if not self._stopping.wait(_RETRY_S):  # out of descriptors, or the caller has left
                    log.warning("cannot accept a hand-off: %s", error)
                continue
            if not self._slots.acquire(blocking=False):
                sock.close()
                continue
            name = "handoff-reader"
            threading.Thread(target=self._guard, args=(sock,), name=name, daemon=True).start()

    def _guard(self, sock: socket.socket) -> None:
        frames = FrameSocket(sock, PEER_TIMEOUT_S)
        with self._open_lock:
            self._open.add(frames)
        if self._stopping.is_set():  # `stop` may have looked before this one was there
            frames.interrupt()
        try:
            self._serve(frames)
        except HandoffError as error:
            log.warning("hand-off ended early: %s", error)
        except Exception:  # task boundary: one reader's thread must not disturb the others
            log.exception("a hand-off failed in an unexpected way")
        finally:
            with self._open_lock:
                self._open.discard(frames)
            frames.close()
            self._slots.release()

    def _serve(self, frames: FrameSocket) -> None:
        header = frames.read_header()
        if header.kind is not Kind.HELLO:
            raise HandoffBroken(f"expected HELLO, got {header.kind.name}")
        try:
            offer = self._claim(frames.read_control(header))
        except HandoffRefused as refusal:
            frames.send_control(Kind.REFUSED, message=str(refusal))
            raise
        reason = "peer lost"
        try:
            frames.send_control(
                Kind.WELCOME,
                prompt_tokens=offer.prompt_tokens,
                block_bytes=self._pool.layout.block_bytes,
                share=self._share(),
            )
            begin = self._await_begin(frames, offer)
            start = begin.get("start_block")
            if not isinstance(start, int) or start < 0:
                raise HandoffBroken(f"BEGIN asks for block {start!r}")
            self._send_all(frames, offer, start, begin.get("shared") is True)
            if frames.read_header().kind is Kind.DONE:
                reason = "read"
        finally:
            offer.stop_reading(reason)

    def _claim(self, hello: dict[str, Any]) -> Offer:
        if hello.get("version") != VERSION:
            raise HandoffRefused(
                f"hand-off protocol {hello.get('version')!r}, this worker speaks {VERSION}: "
                "run the same splitserve on both"
            )
        if hello.get("pairing") != self._pairing_key:
            raise HandoffRefused(
                f"KV differs: here {self._pairing_key}, there {hello.get('pairing')}"
            )
        return self._table.claim(
            str(hello.get("id")), str(hello.get("key")), str(hello.get("prompt_hash"))
        )

    def _share(self) -> dict[str, Any] | None:
        fd = self._pool.share_fd
        if fd is None:
            return None
        token = self._pool.share_token.hex()
        return {"pid": os.getpid(), "fd": fd, "token": token, "blocks": self._pool.blocks}

    def _await_begin(self, frames: FrameSocket, offer: Offer) -> dict[str, Any]:
        while True:
            header = frames.read_header()
            fields = frames.read_control(header)
            if header.kind is Kind.BEGIN:
                return fields
            if header.kind is not Kind.WAIT:
                raise HandoffBroken(f"expected BEGIN, got {header.kind.name}")
            self._check_live(frames, offer)  # nobody keeps KV for what was released meanwhile

    @staticmethod
    def _check_live(frames: FrameSocket, offer: Offer) -> None:
        if offer.failure or offer.ended:
            frames.send_control(Kind.FAILED, message=offer.failure or offer.ended)
            raise HandoffRefused(offer.failure or offer.ended)

    def _send_all(self, frames: FrameSocket, offer: Offer, start: int, shared: bool) -> None:
        block = start
        while True:
            if not offer.wait_for(block, _HEARTBEAT_S):
                frames.send_control(Kind.IDLE)
                continue
            self._check_live(frames, offer)
            while block < len(offer.blocks):
                self._send_block(frames, offer.blocks[block], block, shared)
                block += 1
            if offer.logits is not None and block >= len(offer.blocks):
                frames.send_bytes(Kind.LOGITS, 0, offer.logits)
                return

    def _send_block(self, frames: FrameSocket, number: int, index: int, shared: bool) -> None:
        data = self._pool.read_block(number)
        if shared:
            frames.send_shared(index, number, checksum(data))
        else:
            frames.send_bytes(Kind.BLOCK, index, data)
        self.sent_bytes += len(data)
