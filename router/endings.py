"""Where an answer goes, and how it can end without being whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from router.wire import Headers
from splitserve import messages as m


@dataclass(frozen=True, slots=True)
class EngineAnswer:
    """An engine's own error answer, kept to be passed on as it is."""

    status: int
    headers: Headers
    body: bytes


class Output(Protocol):
    """Where the answer goes: the client's connection."""

    async def start(self, status: int, headers: Headers) -> None: ...

    async def write(self, piece: bytes) -> None: ...

    async def finish(self) -> None: ...


class RejectedError(Exception):
    """The scheduler ended the request. `answer`: what the engine said, where it said something.

    `begun`: bytes have gone to the client. `timed_out`: a deadline ended the last attempt.
    """

    def __init__(
        self, reject: m.Reject, answer: EngineAnswer | None, *, begun: bool, timed_out: bool
    ) -> None:
        super().__init__(reject.detail)
        self.reject = reject
        self.answer = answer
        self.begun = begun
        self.timed_out = timed_out


class AbandonedError(Exception):
    """The client has left."""
