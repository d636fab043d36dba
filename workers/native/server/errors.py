"""Errors in the OpenAI envelope.

ApiError, with the constructors `bad_request`, `unsupported`, `too_large`, ... ; `classify` maps
what the engine and the hand-off raise.
"""

from __future__ import annotations

from typing import Any

from workers.native.engine.errors import (
    EngineBusyError,
    EngineError,
    EngineStoppedError,
    PromptTooLongError,
)
from workers.native.handoff.errors import HandoffError


class ApiError(Exception):
    """An answer that is an error: status, and the four fields of the OpenAI envelope."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s

    def envelope(self) -> dict[str, Any]:
        """Return the body of the answer."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request itself is wrong."""
    return ApiError(400, message, param=param, code=code)


def unsupported(field: str, mend: str) -> ApiError:
    """400: a known OpenAI field that this engine does not implement. Never ignored in silence."""
    message = f"'{field}' is not supported by the native engine; {mend}"
    return ApiError(400, message, param=field, code="unsupported_parameter")


def classify(error: Exception) -> ApiError:
    """Map an error of the engine or of a hand-off to its answer."""
    if isinstance(error, ApiError):
        return error
    match error:
        case PromptTooLongError():
            return bad_request(str(error), "messages", error.code)
        case EngineBusyError():
            return ApiError(429, str(error), code=error.code, retry_after_s=1)
        case EngineStoppedError():
            return ApiError(503, str(error), code=error.code, retry_after_s=1)
        case HandoffError():
            return ApiError(502, f"hand-off failed: {error}", code=error.code)
        case EngineError():
            return ApiError(500, str(error), code=error.code)
        case _:
            return ApiError(500, f"internal error: {type(error).__name__}", code="internal_error")
