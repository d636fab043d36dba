"""The decode side: claim an offer, wait for room, fill blocks as they come, check, confirm."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from workers.native.handoff.errors import (
    HandoffBroken,
    HandoffCorrupt,
    HandoffError,
    HandoffRefused,
)
from workers.native.handoff.frames import VERSION, FrameSocket, Header, Kind, checksum
from workers.native.handoff.reference import HandoffReference
from workers.native.handoff.shared_pool import SharedPool
from workers.native.kv.pool import KvPool

log = logging.getLogger("splitserve.handoff")

_HEARTBEAT_S = 2.0


@dataclass(frozen=True, slots=True)
class PullStats:
    """What a hand-off moved and how long it took, in bytes and seconds.

    `transfer_s` is the time spent moving: it leaves out waiting for prefill to compute more.
    """

    blocks: int
    moved_bytes: int
    transfer_s: float
    shared: bool


@dataclass(frozen=True, slots=True)
class Pulled:
    """A finished hand-off: float32 logits of the last prompt token, little endian."""

    logits: bytearray
    stats: PullStats


@dataclass(eq=False)
class Pull:
    """One hand-off on the decode side; `run` is its thread. `cancel` may come from any thread.

    The thread owns the blocks given by `begin` until it has called `on_end`.
    """

    reference: HandoffReference
    prompt_hash: str
    prompt_tokens: int
    pool: KvPool
    pairing_key: str
    logits_bytes: int
    clock: Callable[[], float]
    timeout_s: float = 10.0
    allow_shared: bool = True
    _target: tuple[list[int], int] | None = None
    _cancelled: bool = False
    _frames: FrameSocket | None = None
    _shared: SharedPool | None = None
    _done: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def begin(self, blocks: list[int], start_block: int) -> None:
        """Room was found: fill `blocks`, the blocks of the prompt from `start_block` on."""
        with self._changed:
            self._target = (blocks, start_block)
            self._changed.notify_all()

    def cancel(self) -> None:
        """Stop as soon as possible; `run` then raises HandoffBroken."""
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()
            frames = self._frames
        if frames is not None:
            frames.interrupt()

    def run(self) -> Pulled:
        """Do it all. Raises HandoffError; the blocks then hold nothing of use."""
        try:
            return self.receive()
        finally:
            self.close()

    def receive(self) -> Pulled:
        """Do it all but `close`, for who is in a hurry. Raises HandoffError as `run` does."""
        frames = self._connect()
        share, block_bytes = self._greet(frames)
        blocks, start_block = self._await_room(frames)
        if share is not None and self.allow_shared:
            self._shared = SharedPool.open(share, block_bytes)
            frames.hold_much()
        shared = self._shared
        frames.send_control(Kind.BEGIN, start_block=start_block, shared=shared is not None)
        pulled = self._receive(frames, blocks, start_block, shared)
        frames.send_control(Kind.DONE)
        self._done = True
        return pulled

    def close(self) -> None:
        """Give back the connection and the mapping of the peer's pool, once."""
        frames, shared = self._frames, self._shared
        self._shared = None
        if frames is not None:
            frames.close(abort=not self._done)
        if shared is not None:
            shared.close()

    def _connect(self) -> FrameSocket:
        address = (self.reference.host, self.reference.port)
        try:
            sock = socket.create_connection(address, self.timeout_s)
        except (OSError, ValueError, OverflowError) as error:  # the last two: no such host or port
            where = f"{address[0]}:{address[1]}"
            raise HandoffBroken(f"cannot reach the prefill worker at {where}: {error}") from error
        frames = FrameSocket(sock, self.timeout_s)
        with self._changed:
            self._frames = frames
            if self._cancelled:
                frames.interrupt()
        return frames

    def _greet(self, frames: FrameSocket) -> tuple[dict[str, object] | None, int]:
        frames.send_control(
            Kind.HELLO,
            version=VERSION,
            id=self.reference.offer_id,
            key=self.reference.key,
            pairing=self.pairing_key,
            prompt_hash=self.prompt_hash,
        )
        header = frames.read_header()
        fields = frames.read_control(header)
        if header.kind is Kind.REFUSED:
            raise HandoffRefused(str(fields.get("message")))
        if header.kind is not Kind.WELCOME:
            raise HandoffCorrupt(f"expected WELCOME, got {header.kind.name}")
        wanted = (self.prompt_tokens, self.pool.layout.block_bytes)
        offered = (fields.get("prompt_tokens"), fields.get("block_bytes"))
        if offered != wanted:
            raise HandoffCorrupt(f"offered (tokens, block bytes) {offered}, expected {wanted}")
        share = fields.get("share")
        return (share if isinstance(share, dict) else None), wanted[1]

    def _await_room(self, frames: FrameSocket) -> tuple[list[int], int]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._target or self._cancelled, _HEARTBEAT_S)
                if self._cancelled:
                    raise HandoffBroken("cancelled")
                if self._target is not None:
                    return self._target
            frames.send_control(Kind.WAIT)

    def _receive(
        self, frames: FrameSocket, blocks: list[int], start_block: int, shared: SharedPool | None
    ) -> Pulled:
        done, transfer_s = 0, 0.0
        while True:
            header = frames.read_header()
            started_s = self.clock()
            match header.kind:
                case Kind.BLOCK | Kind.SHARED:
                    if header.index != start_block + done or done >= len(blocks):
                        raise HandoffCorrupt(f"block {header.index} came out of order")
                    self._fill(frames, header, blocks[done], shared)
                    done += 1
                case Kind.LOGITS:
                    if done != len(blocks):
                        raise HandoffCorrupt(f"{done} blocks came, {len(blocks)} were due")
                    logits = self._logits(frames, header)
                    transfer_s += self.clock() - started_s
                    moved_bytes = done * self.pool.layout.block_bytes + len(logits)
                    stats = PullStats(done, moved_bytes, transfer_s, shared is not None)
                    return Pulled(logits, stats)
                case Kind.IDLE:
                    frames.read_control(header)
                case Kind.FAILED:
                    message = frames.read_control(header).get("message")
                    raise HandoffBroken(f"prefill failed: {message}")
                case _:
                    raise HandoffCorrupt(f"unexpected {header.kind.name}")
            transfer_s += self.clock() - started_s

    def _logits(self, frames: FrameSocket, header: Header) -> bytearray:
        logits = bytearray(self.logits_bytes)
        frames.read_into(header, memoryview(logits))
        return logits

    def _fill(
        self, frames: FrameSocket, header: Header, block: int, shared: SharedPool | None
    ) -> None:
        size = self.pool.layout.block_bytes
        in_place = self.pool.in_host_memory
        target = self.pool.host_block(block) if in_place else memoryview(bytearray(size))
        if header.kind is Kind.SHARED:
            self._copy_shared(frames, header, target, shared)
        else:
            frames.read_into(header, target)
        if not in_place:
            self.pool.write_block(block, target)

    @staticmethod
    def _copy_shared(
        frames: FrameSocket, header: Header, target: memoryview, shared: SharedPool | None
    ) -> None:
        pool_block, digest = frames.read_shared(header)
        if shared is None:
            raise HandoffCorrupt("a shared block came where none was asked for")
        try:
            target[:] = shared.block(pool_block)
        except IndexError as error:
            raise HandoffCorrupt(f"shared {error}") from error
        if checksum(target) != digest:  # also when the peer reused the block meanwhile
            raise HandoffCorrupt(f"checksum of shared block {header.index} does not match")


def end_of(pull: Pull) -> Pulled | HandoffError:
    """Receive all of a pull and return that or its failure; for the thread that carries it.

    The caller closes the pull afterwards.
    """
    try:
        return pull.receive()
    except HandoffError as error:
        return error
    except Exception as error:  # task boundary: the engine waits for an end, whatever it is
        log.exception("a hand-off failed in an unexpected way")
        return HandoffBroken(f"unexpected {type(error).__name__}: {error}")
