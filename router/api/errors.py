"""Errors of the edge, in the OpenAI envelope."""

from __future__ import annotations

import json
from typing import Any

from splitserve.messages import Refusal, Reject

_STATUS = {
    Refusal.UNKNOWN_MODEL: (404, "model_not_found"),
    Refusal.NO_WORKER: (503, "no_worker"),
    Refusal.QUEUE_FULL: (429, "queue_full"),
    Refusal.HOPELESS: (429, "target_out_of_reach"),
    Refusal.UNPLANNABLE: (400, "unplannable"),
    Refusal.FAILED: (502, "worker_failed"),
    Refusal.BROKEN: (502, "worker_broke"),
}
_MEND = {
    Refusal.UNKNOWN_MODEL: "GET /v1/models lists the models",
    Refusal.NO_WORKER: "GET /admin/workers shows what is wrong with each worker",
    Refusal.QUEUE_FULL: "try again later or add a worker",
    Refusal.HOPELESS: "try again after Retry-After, or ask without failing fast",
    Refusal.UNPLANNABLE: "leave out x-splitserve-plan and -worker, or add a worker for it",
    Refusal.FAILED: "the worker's log says more",
    Refusal.BROKEN: "send the request again; the worker's log says more",
}


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        message = " ".join(message.split())  # one line, whatever a client named its model
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    def envelope(self) -> dict[str, Any]:
        """Return the body of the answer."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        if self.status == 401:
            kind = "authentication_error"
        elif self.status == 429:
            kind = "rate_limit_error"
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }

    def body(self) -> bytes:
        """Return the body as bytes."""
        return json.dumps(self.envelope()).encode()

    def event(self) -> bytes:
        """Return the server-sent event that ends a stream which had begun."""
        return b"data: " + self.body() + b"\n\n"


def from_reject(reject: Reject, *, timed_out: bool = False) -> ApiError:
    """Turn the scheduler's refusal into an answer. `timed_out`: a deadline of ours ended it."""
    status, code = (504, "worker_timeout") if timed_out else _STATUS[reject.refusal]
    return ApiError(
        status,
        f"{reject.detail}; {_MEND[reject.refusal]}",
        code=code,
        param="model" if reject.refusal is Refusal.UNKNOWN_MODEL else None,
        retry_after_s=reject.retry_after_s,
    )
