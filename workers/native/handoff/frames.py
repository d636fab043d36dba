"""The hand-off protocol on the wire, version 1. One TCP connection per hand-off.

    decode worker                          prefill worker
    HELLO {id, key, pairing, ...}    ->
                                     <-    WELCOME {prompt_tokens, share} | REFUSED {message}
    WAIT {} (heartbeat, until it has room)
    BEGIN {start_block, shared}      ->
                                     <-    BLOCK | SHARED ..., IDLE (heartbeat) ..., LOGITS | FAILED
    DONE {}                          ->    KV is freed

Every message is a 32-byte header (little endian: magic, kind, index, payload length, checksum)
and a payload. Control payloads are JSON. A BLOCK's payload is the block itself; where both workers
share a host, a SHARED frame comes in its place and tells where the block lies in the prefill
worker's pool, and its checksum. LOGITS carries float32 logits of the last prompt token, so that the
decode worker samples the first token. Checksums are XXH3-64.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import xxhash

from workers.native.handoff.errors import HandoffBroken, HandoffCorrupt

Bytes = bytes | bytearray | memoryview

VERSION = 1
MAX_CONTROL_BYTES = 64 * 1024
_HEADER = struct.Struct("<4sIQQQ")
_SHARED = struct.Struct("<QQ")
_MAGIC = b"SSKV"
_PIECE_BYTES = 256 * 1024  # hash a piece right after it came, while it is in the cache
HEADER_BYTES = _HEADER.size
_HELD_BYTES = 1 << 20
_RESET = struct.pack("ii", 1, 0)  # linger: on, for 0 seconds


class Kind(IntEnum):
    """What a frame carries."""

    HELLO = 1
    WELCOME = 2
    REFUSED = 3
    WAIT = 4
    BEGIN = 5
    BLOCK = 6
    LOGITS = 7
    IDLE = 8
    FAILED = 9
    DONE = 10
    SHARED = 11


@dataclass(frozen=True, slots=True)
class Header:
    """A frame's header; `index` numbers a block within its prompt, and is 0 elsewhere."""

    kind: Kind
    index: int
    payload_bytes: int
    checksum: int


def checksum(data: Bytes) -> int:
    """XXH3-64 of `data`."""
    return xxhash.xxh3_64_intdigest(data)


def pack(kind: Kind, index: int, payload_bytes: int, digest: int) -> bytes:
    """Return a header's 32 bytes."""
    return _HEADER.pack(_MAGIC, kind, index, payload_bytes, digest)


def unpack(raw: bytes) -> Header:
    """Read a header. Raises HandoffCorrupt when it is none."""
    magic, kind, index, payload_bytes, digest = _HEADER.unpack(raw)
    if magic != _MAGIC or kind not in Kind._value2member_map_:
        raise HandoffCorrupt(f"not a hand-off frame: {raw[:8]!r}; is another service on that port?")
    return Header(Kind(kind), index, payload_bytes, digest)


class FrameSocket:
    """A connected socket that speaks frames. One thread at a time.

    `timeout_s` bounds every single read and write; a peer that stays silent longer is dead.
    """

    def __init__(self, sock: socket.socket, timeout_s: float) -> None:
        sock.settimeout(timeout_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = sock
        self._timeout_s = timeout_s

    def send_control(self, kind: Kind, **fields: Any) -> None:
        """Send a JSON message."""
        body = json.dumps(fields).encode()
        self._send(pack(kind, 0, len(body), checksum(body)) + body)

    def send_bytes(self, kind: Kind, index: int, payload: memoryview) -> None:
        """Send a frame whose payload travels from where it lies."""
        self._send(pack(kind, index, len(payload), checksum(payload)))
        self._send(payload)

    def send_shared(self, index: int, pool_block: int, digest: int) -> None:
        """Tell where a block lies in the shared pool, and the checksum of its bytes."""
        body = _SHARED.pack(pool_block, digest)
        self._send(pack(Kind.SHARED, index, len(body), checksum(body)) + body)

    def read_shared(self, header: Header) -> tuple[int, int]:
        """Read the payload of a SHARED frame: pool block and checksum of its bytes."""
        raw = bytearray(_SHARED.size)
        self.read_into(header, memoryview(raw))
        pool_block, digest = _SHARED.unpack(raw)
        return int(pool_block), int(digest)

    def read_header(self) -> Header:
        """Wait for the next frame."""
        raw = bytearray(HEADER_BYTES)
        self._receive_into(memoryview(raw))
        return unpack(bytes(raw))

    def read_control(self, header: Header) -> dict[str, Any]:
        """Read the JSON payload of `header`."""
        if header.payload_bytes > MAX_CONTROL_BYTES:
            raise HandoffCorrupt(f"a {header.kind.name} of {header.payload_bytes} bytes")
        raw = bytearray(header.payload_bytes)
        self.read_into(header, memoryview(raw))
        try:
            fields = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise HandoffCorrupt(f"{header.kind.name} is not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise HandoffCorrupt(f"{header.kind.name} is not a JSON object")
        return fields

    def read_into(self, header: Header, target: memoryview) -> None:
        """Fill `target` with the payload and check length and checksum."""
        if header.payload_bytes != len(target):
            raise HandoffCorrupt(
                f"{header.kind.name} {header.index} has {header.payload_bytes} bytes, "
                f"not {len(target)}"
            )
        state = xxhash.xxh3_64()
        for start in range(0, len(target), _PIECE_BYTES):
            piece = target[start : start + _PIECE_BYTES]
            self._receive_into(piece)
            state.update(piece)
        if state.intdigest() != header.checksum:
            raise HandoffCorrupt(f"checksum of {header.kind.name} {header.index} does not match")

    def hold_much(self) -> None:
        """Let the system hold a whole LOGITS frame, so that its sender need not wait for us.

        For a peer on this host only: over a network the system sizes the buffer better itself.
        """
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _HELD_BYTES)

    def interrupt(self) -> None:
        """Make the thread that reads or writes fail at once; for any other thread.

        It does not close: the descriptor could be another connection's by the time it is used.
        """
        with contextlib.suppress(OSError):  # the peer closed it already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self, *, abort: bool = False) -> None:
        """Close; for the thread that reads and writes.

        With `abort` the peer gets a reset: one that is stuck in sending would not notice a plain
        close before its timeout, and hold KV till then.
        """
        if abort:
            with contextlib.suppress(OSError):  # some systems refuse it once the peer has closed
                self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        else:
            self.interrupt()
        self._socket.close()

    def _send(self, data: Bytes) -> None:
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise HandoffBroken(f"the peer went away while sending: {error}") from error

    def _receive_into(self, target: memoryview) -> None:
        got = 0
        try:
            while got < len(target):
                count = self._socket.recv_into(target[got:], 0, socket.MSG_WAITALL)
                if count == 0:
                    raise HandoffBroken("the peer closed the connection early")
                got += count
        except TimeoutError as error:
            silence = f"the peer was silent for {self._timeout_s:g} s"
            raise HandoffBroken(silence) from error
        except OSError as error:
            raise HandoffBroken(f"the peer went away: {error}") from error
