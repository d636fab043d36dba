"""One request inside a simulated engine, and what a step brought."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

HASH_BLOCK_TOKENS = 512  # what one block hash of the traces stands for


class Stage(IntEnum):
    """Where a job is. It holds KV from PULLING to HELD."""

    WAITING = 0  # for sequences, budget or memory; also after a preemption
    PULLING = 1  # its KV was computed elsewhere and is on its way
    PROMPT = 2  # its prompt is being computed
    DECODING = 3  # a token each step
    HELD = 4  # its prompt is done and its KV waits for another worker
    GONE = 5


@dataclass(frozen=True, slots=True)
class EngineShape:
    """Bounds of one engine.

    `priority`: jobs are taken, and preempted, by priority, then age. `reserve_prompt`: a prompt is
    admitted when all of it fits, as vLLM does since 0.18; else when its first chunk does.
    """

    kv_tokens: int = 41_408
    max_sequences: int = 256
    block_tokens: int = 16
    priority: bool = False
    reserve_prompt: bool = True


@dataclass(eq=False, slots=True)
class Job:
    """Sizes in tokens. `prefill_only` jobs end with their prompt, which a `pulled` one has not to
    compute. `bursts` tells in which of the engine's steps it produced tokens: (first, last).
    """

    key: tuple[str, int]
    prompt_tokens: int
    output_tokens: int
    priority: int = 0
    prefill_only: bool = False
    pulled: bool = False
    block_hashes: tuple[int, ...] = ()
    stage: Stage = Stage.WAITING
    cached_tokens: int = 0
    computed: int = 0
    prompt_blocks: int = 0  # held while its prompt is computed, and after for another worker
    emitted: int = 0
    joined_step: int = 0
    ends_step: int = 0
    order: int = 0
    admitted: int = 0
    bursts: list[tuple[int, int]] = field(default_factory=list)

    @property
    def target(self) -> int:
        """Tokens whose KV the next token needs: prompt, and after a preemption the output."""
        return self.prompt_tokens + self.emitted

    @property
    def decoding(self) -> bool:
        """True while it produces a token each step."""
        return self.stage is Stage.DECODING

    def tokens_at(self, step: int) -> int:
        """Output tokens produced up to `step` of its engine."""
        return self.emitted + (step - self.joined_step if self.stage is Stage.DECODING else 0)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step brought: first tokens, finished prompts of hand-offs, ends."""

    first: tuple[Job, ...]
    prefilled: tuple[Job, ...]
    finished: tuple[Job, ...]
