"""Errors of the workers, outside the native engine's own.

WorkerError
└── BadSetting    a worker was told something it cannot do
"""

from __future__ import annotations


class WorkerError(Exception):
    """Root of what a worker raises on purpose; its text is one line with the mend."""


class BadSetting(WorkerError):
    """A worker was told something it cannot do."""

    def __init__(self, name: str, value: object, mend: str) -> None:
        super().__init__(f"{name}: {value!r} cannot be used; {mend}")
        self.name = name
