"""Bounds of one engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """How much one engine holds and how much it does per step.

    `step_tokens` is the token budget of a step: the longest a decoding stream waits for a prompt
    is one step of that many tokens.
    """

    max_running: int = 64
    max_waiting: int = 256
    step_tokens: int = 512
    kv_tokens: int = 32768
    block_tokens: int = 16
    max_context_tokens: int = 0  # 0: the model's own
    lease_s: float = 30.0
    peer_timeout_s: float = 10.0
