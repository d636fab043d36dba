"""Errors of the router.

RouterError
├── SettingsError        the configuration cannot be used
├── BadWorkerUrl         a worker's address cannot be used
├── ProbeFailed          what answers at an address, if anything, cannot be used as a worker
└── UpstreamError        talking to a worker failed; names the worker, the cause and the mend
    ├── ConnectFailed    no connection: refused, unreachable, name not found, TLS refused
    ├── LimitReached     a limit of this router, no fault of the worker
    ├── TimedOut         a deadline passed; `phase` says which
    ├── ClosedEarly      the worker ended the connection before the answer was whole
    ├── Malformed        the answer is no valid HTTP/1.1
    ├── ReplyTooLarge    the answer is longer than the caller is ready to hold
    └── HandoffFailed    KV that was to be handed over cannot be used
        └── HandoffExpired   it is kept no longer, so what would be read may be something else
"""

from typing import Literal

Phase = Literal["connect", "first_byte", "idle", "total"]

_PHASE_CAUSE: dict[Phase, str] = {
    "connect": "no connection",
    "first_byte": "no first byte of an answer",
    "idle": "no further byte of the answer",
    "total": "no end of the answer",
}


class RouterError(Exception):
    """Root of what the router raises on purpose."""


class SettingsError(RouterError):
    """The configuration cannot be used. Its text is one line: place, cause, mend."""


class BadWorkerUrl(RouterError):
    """A worker's address cannot be used."""

    def __init__(self, url: str, cause: str) -> None:
        super().__init__(
            f"worker URL {url!r}: {cause}; write it like http://10.0.0.5:8000 or http://[::1]:8000"
        )
        self.url = url
        self.cause = cause


class ProbeFailed(RouterError):
    """What answers at an address cannot be used. Its text is one line: address, cause, mend."""

    def __init__(self, url: str, cause: str, mend: str) -> None:
        super().__init__(f"{url}: {cause}; {mend}")
        self.url = url


class UpstreamError(RouterError):
    """Talking to a worker failed. Its text is one line: worker, cause, mend."""

    def __init__(self, worker_url: str, cause: str, mend: str) -> None:
        super().__init__(f"worker {worker_url}: {cause}; {mend}")
        self.worker_url = worker_url
        self.cause = cause
        self.mend = mend


class ConnectFailed(UpstreamError):
    """No connection could be made."""

    def __init__(self, worker_url: str, reason: str) -> None:
        super().__init__(
            worker_url, f"cannot connect ({reason})", "start the worker or correct its URL"
        )


class LimitReached(UpstreamError):
    """A limit of this router stopped the request; the worker is not to blame."""


class TimedOut(UpstreamError):
    """The deadline of ``phase`` passed after ``limit_s`` seconds."""

    def __init__(self, worker_url: str, phase: Phase, limit_s: float) -> None:
        super().__init__(
            worker_url,
            f"{_PHASE_CAUSE[phase]} within {limit_s:g} s",
            f"look whether the worker hangs, or raise its {phase}_s deadline",
        )
        self.phase = phase
        self.limit_s = limit_s


class ClosedEarly(UpstreamError):
    """The worker ended the connection after ``received_bytes`` of an unfinished answer."""

    def __init__(self, worker_url: str, received_bytes: int, reason: str) -> None:
        super().__init__(
            worker_url,
            f"closed the connection after {received_bytes} bytes of an unfinished answer"
            f" ({reason})",
            "read the worker's log",
        )
        self.received_bytes = received_bytes


class Malformed(UpstreamError):
    """The answer is no valid HTTP/1.1."""

    def __init__(self, worker_url: str, reason: str) -> None:
        super().__init__(
            worker_url,
            f"its answer is no valid HTTP/1.1 ({reason})",
            "check that the URL points at an HTTP server",
        )


class ReplyTooLarge(UpstreamError):
    """The answer is longer than the caller is ready to hold."""

    def __init__(self, worker_url: str, limit_bytes: int) -> None:
        super().__init__(
            worker_url,
            f"its answer is longer than {limit_bytes} bytes",
            "check that the URL points at an inference server",
        )


class HandoffFailed(UpstreamError):
    """KV that was to be handed over cannot be used; the prompt can be prefilled again."""


class HandoffExpired(HandoffFailed):
    """The KV is kept no longer: what a decode worker would read may be another request's."""

    def __init__(self, worker_url: str, age_s: float, lease_s: float) -> None:
        super().__init__(
            worker_url,
            f"the KV for it is {age_s:.1f} s old and its lease is {lease_s:g} s",
            "look what holds requests up, or raise kv_lease_duration on the prefill worker",
        )
        self.age_s = age_s
        self.lease_s = lease_s
