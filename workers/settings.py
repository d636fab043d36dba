"""What one worker process is told at start."""

from __future__ import annotations

from dataclasses import dataclass

ROLES = ("prefill", "decode", "aggregated", "auto")


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """Settings of one native worker. `model_path` None: resolve `model` by name."""

    model: str
    role: str = "aggregated"
    host: str = "127.0.0.1"
    port: int = 8001
    device: str = "cpu"
    dtype: str = "auto"
    threads: int = 0  # 0: torch's own choice
    kv_tokens: int = 32768
    step_tokens: int = 512
    max_running: int = 64
    max_context_tokens: int = 0  # 0: the model's own
    lease_s: float = 30.0
    shared_memory: bool = True
    served_name: str = ""
    parent_pid: int = 0  # leave when this process is gone; 0: nobody
