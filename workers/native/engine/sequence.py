"""One answer in the making: its tokens, its KV blocks, and where its results go."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from workers.native.engine.text import TextStream
from workers.native.handoff.offers import Offer
from workers.native.handoff.pull import Pull, PullStats
from workers.native.sampling.params import SamplingParams
from workers.native.sampling.sampler import TokenLogprob


@dataclass(frozen=True, slots=True)
class PromptReport:
    """Told once, when a prompt is ready: tokens, how many came from the cache, seconds spent."""

    prompt_tokens: int
    cached_tokens: int
    prefill_s: float
    queued_s: float
    pulled: PullStats | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of prompt tokens 1.. (the first token has none), for `echo`."""

    index: int
    entries: tuple[tuple[TokenLogprob, tuple[TokenLogprob, ...]], ...]


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token. `text` is what it made sendable; `finish` is set on the last one."""

    index: int
    token_id: int
    text: str
    logprob: TokenLogprob | None = None
    top: tuple[TokenLogprob, ...] = ()
    finish: str | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ends with this error; nothing follows."""

    error: Exception


Output = PromptReport | PromptLogprobs | Token | Failed
Sink = Callable[[Output], None]


@dataclass(eq=False, slots=True)
class Sequence:
    """The engine's record of one choice of a request. Only the engine thread touches it.

    `index` is the choice's number in the answer, `fork` its number among the choices of one
    prompt (0 is the one that computes the prompt; `siblings` fork from it when that is done).
    Prompts of a lower `priority` number are computed first.
    `computed` counts tokens whose KV is in `blocks`.
    """

    request_id: str
    index: int
    fork: int
    prompt: list[int]
    params: SamplingParams
    sink: Sink
    text: TextStream
    salt: bytes
    arrived_s: float
    priority: int = 0
    siblings: list[Sequence] = field(default_factory=list)
    offer: Offer | None = None
    pull: Pull | None = None
    prompt_logprobs: int | None = None
    output: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    computed: int = 0
    cached: int = 0
    published: int = 0
    offered: int = 0
    started_s: float = 0.0
    queued_s: float = 0.0
    pulling: bool = False
    aborted: bool = False
    prompt_entries: list[tuple[TokenLogprob, tuple[TokenLogprob, ...]]] = field(
        default_factory=list
    )

    @property
    def total(self) -> int:
        """Tokens so far, prompt and output."""
        return len(self.prompt) + len(self.output)

    @property
    def remaining(self) -> int:
        """Tokens whose KV is still to be computed; the last one's logits give the next token."""
        return self.total - self.computed

    def tokens(self, start: int, count: int) -> Seq[int]:
        """Token ids from `start`, over the seam of prompt and output."""
        edge = len(self.prompt)
        if start >= edge:
            return self.output[start - edge : start - edge + count]
        if start + count <= edge:
            return self.prompt[start : start + count]
        return [*self.prompt[start:], *self.output[: start + count - edge]]
