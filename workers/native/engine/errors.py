"""What the engine says no to.

EngineError
├── PromptTooLongError    prompt and wanted output exceed the model's context or the KV cache
├── EngineBusyError       the waiting queue is full
└── EngineStoppedError    the engine is shutting down, or its loop has died
"""

from __future__ import annotations


class EngineError(Exception):
    """A request the engine cannot take or finish."""

    code = "engine_error"


class PromptTooLongError(EngineError):
    """More tokens than fit."""

    code = "context_length_exceeded"


class EngineBusyError(EngineError):
    """Too many requests wait already."""

    code = "engine_busy"


class EngineStoppedError(EngineError):
    """No more work is taken."""

    code = "engine_stopped"
