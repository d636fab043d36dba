"""What the engine counts. Written by the engine thread, read by whoever asks."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class EngineStats:
    """Counters since start and gauges of now. Rates are exponentially weighted, per second."""

    running: int = 0
    waiting: int = 0
    kv_used_tokens: int = 0
    kv_capacity_tokens: int = 0
    kv_cached_tokens: int = 0
    evicted_blocks: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    step_s: float = 0.0
    pulls: int = 0
    pulled_bytes: int = 0
    pull_failures: int = 0
    failures: int = 0
    prefill_tok_s: float = 0.0
    decode_tok_s: float = 0.0
    finished: dict[str, int] = field(default_factory=dict)

    def saw_step(self, decode_rows: int, prompt_rows: int, duration_s: float) -> None:
        """Take in one step; only unmixed ones tell a rate."""
        self.steps += 1
        self.step_s += duration_s
        if duration_s <= 0:
            return
        if decode_rows == 1 and not prompt_rows:
            self.decode_tok_s = _mean(self.decode_tok_s, 1 / duration_s)
        elif prompt_rows >= 64 and not decode_rows:
            self.prefill_tok_s = _mean(self.prefill_tok_s, prompt_rows / duration_s)

    def saw_finish(self, reason: str) -> None:
        """Count an end by its reason."""
        self.finished[reason] = self.finished.get(reason, 0) + 1


def _mean(known: float, seen: float) -> float:
    return seen if known == 0.0 else known + 0.1 * (seen - known)
