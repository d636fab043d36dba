"""An `EngineCore` whose thread, clock, peers and hand-off threads are the caller's to move."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from workers.native.engine.core import EngineCore
from workers.native.engine.errors import EngineStoppedError
from workers.native.engine.sequence import (
    Failed,
    Output,
    PromptLogprobs,
    PromptReport,
    Token,
)
from workers.native.engine.sequence import Sequence as Answer
from workers.native.engine.settings import EngineSettings
from workers.native.engine.text import TextStream
from workers.native.handoff.errors import HandoffBroken
from workers.native.handoff.offers import Offer, OfferTable
from workers.native.handoff.pull import Pull, Pulled, PullStats
from workers.native.handoff.reference import HandoffReference, hash_prompt
from workers.native.kv.pool import KvPool
from workers.native.sampling.params import SamplingParams
from workers.native.sampling.sampler import sample
from workers.native.testing.history_model import HistoryModel

EOS = frozenset({0})
_NOWHERE = HandoffReference("offer", "key", "127.0.0.1", 9)


class Letters:
    """A detokenizer: token 1 is "b", token 2 is "c", ..."""

    def push(self, token_id: int) -> str:
        """See `Detokenizer`."""
        return chr(ord("a") + token_id)

    def flush(self) -> str:
        """Nothing is ever held."""
        return ""


@dataclass(slots=True)
class Received:
    """What one request's sink was told. Refuses what may not follow."""

    tokens: dict[int, list[Token]] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)
    reports: list[PromptReport] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    failures: list[Exception] = field(default_factory=list)
    closed: bool = False

    def take(self, output: Output) -> None:
        """The sink."""
        assert not self.closed, f"{output} after the request was aborted"
        match output:
            case Token():
                assert output.index not in self.finish, f"{output} after its choice finished"
                self.tokens.setdefault(output.index, []).append(output)
                if output.finish is not None:
                    self.finish[output.index] = output.finish
            case Failed(error):
                self.failures.append(error)
            case PromptReport():
                self.reports.append(output)
            case PromptLogprobs():
                self.prompt_logprobs.append(output)

    def ids(self, index: int = 0) -> list[int]:
        """Token ids of one choice."""
        return [token.token_id for token in self.tokens.get(index, [])]

    def text(self, index: int = 0) -> str:
        """Text of one choice."""
        return "".join(token.text for token in self.tokens.get(index, []))


class HeldPull(Pull):
    """A pull whose thread is the caller: it looks at `target` and calls `DrivenCore.land`."""

    @property
    def target(self) -> tuple[list[int], int] | None:
        """Blocks to fill and the number of the first, once there is room."""
        return self._target

    @property
    def cancelled(self) -> bool:
        """Whether the engine wants it to stop."""
        return self._cancelled


class DrivenCore:
    """The core around a `HistoryModel`. `orders` are what other threads would have sent."""

    def __init__(
        self, *, blocks: int, step_tokens: int, max_running: int = 8, block_tokens: int = 4
    ) -> None:
        self.model = HistoryModel(vocab_size=12)
        self.pool = KvPool(HistoryModel.layout(block_tokens), blocks, torch.device("cpu"))
        self.pool.tensor.fill_(1e6)  # whoever reads what was never written shows it
        settings = EngineSettings(
            max_running=max_running,
            step_tokens=step_tokens,
            max_context_tokens=blocks * block_tokens,
        )
        self.now_s = 100.0
        self.core = EngineCore(self.model, self.pool, settings, EOS, lambda: self.now_s)
        self.offers = OfferTable(30.0, lambda: self.now_s)
        self.orders: deque[Callable[[], None]] = deque()
        self.sequences: list[Answer] = []

    def add(
        self,
        request_id: str,
        prompt: list[int],
        params: SamplingParams,
        *,
        choices: int = 1,
        prompt_logprobs: int | None = None,
        priority: int = 0,
    ) -> Received:
        """Queue a request that is computed here."""
        parent, received = self._family(request_id, prompt, params, choices)
        parent.prompt_logprobs = prompt_logprobs
        parent.priority = priority
        self.core.add(parent)
        return received

    def add_pulled(
        self, request_id: str, prompt: list[int], params: SamplingParams, *, choices: int = 1
    ) -> tuple[Received, Answer, HeldPull]:
        """Queue a request whose prompt is computed elsewhere."""
        parent, received = self._family(request_id, prompt, params, choices)
        pull = HeldPull(
            _NOWHERE, hash_prompt(prompt), len(prompt), self.pool, "", 0, lambda: self.now_s
        )
        parent.pull = pull
        self.core.add(parent)
        return received, parent, pull

    def add_offer(self, request_id: str, prompt: list[int]) -> tuple[Received, Offer]:
        """Queue a prompt to compute for another worker."""
        parent, received = self._family(request_id, prompt, SamplingParams(), 1)

        def ended(offer: Offer, reason: str) -> None:
            self.orders.append(lambda: self.core.offer_ended(parent))

        parent.offer = self.offers.make(hash_prompt(prompt), len(prompt), ended)
        self.core.add(parent)
        return received, parent.offer

    def _family(
        self, request_id: str, prompt: list[int], params: SamplingParams, choices: int
    ) -> tuple[Answer, Received]:
        received = Received()
        self.now_s += 0.001
        parent, *siblings = [
            Answer(
                request_id=request_id,
                index=fork,
                fork=fork,
                prompt=prompt,
                params=params,
                sink=received.take,
                text=TextStream(Letters(), params.stop),
                salt=b"",
                arrived_s=self.now_s,
            )
            for fork in range(choices)
        ]
        parent.siblings = siblings
        self.sequences += [parent, *siblings]
        return parent, received

    # --- what the engine's thread and the hand-off threads do -------------------------------------

    def deliver(self) -> None:
        """Obey what came in."""
        while self.orders:
            self.orders.popleft()()

    def step(self) -> bool:
        """Obey, then step, as `Engine` does it; a step that fails ends what was in it."""
        self.deliver()
        try:
            return self.core.step()
        except RuntimeError as error:
            self.core.fail_all(EngineStoppedError(str(error)))
            return True

    def run(self, limit: int = 1000) -> None:
        """Step until nothing is left to compute."""
        for _ in range(limit):
            if not self.step() and not self.orders:
                return
        raise AssertionError(f"still busy after {limit} steps")

    def land(self, sequence: Answer, pull: HeldPull) -> None:
        """The pull's thread has filled its blocks with the right KV."""
        assert pull.target is not None
        blocks, first = pull.target
        self.model.fill(self.pool, sequence.prompt, blocks, first)
        raw = bytearray(self.model.logits_after(sequence.prompt).numpy().tobytes())
        pulled = Pulled(raw, PullStats(len(blocks), 1, 0.0, False))
        self.orders.append(lambda: self.core.pull_ended(sequence, pulled))

    def spoil(self, sequence: Answer, pull: HeldPull) -> None:
        """The pull's thread gave up, and left rubbish in the blocks it was given."""
        for block in pull.target[0] if pull.target else ():
            self.pool.tensor[block] = float("nan")
        error = HandoffBroken("the peer went away")
        self.orders.append(lambda: self.core.pull_ended(sequence, error))


@dataclass(frozen=True, slots=True)
class Expected:
    """What one choice must be."""

    ids: list[int]
    text: str
    finish: str


def answer_alone(
    logits_after: Callable[[Sequence[int]], torch.Tensor],
    prompt: list[int],
    params: SamplingParams,
    *,
    fork: int = 0,
    eos: frozenset[int] = EOS,
) -> Expected:
    """Answer a prompt without engine, batch or cache."""
    ids: list[int] = []
    text = ""
    while True:
        banned = sorted(eos) if len(ids) < params.min_tokens else ()
        logits = logits_after([*prompt, *ids])
        chosen = sample(logits, params, prompt, ids, sequence=fork, banned=banned).token_id
        ids.append(chosen)
        if chosen in eos:
            return Expected(ids, text, "stop")
        text += Letters().push(chosen)
        stops = [stop for stop in params.stop if text.endswith(stop)]
        if stops:
            return Expected(ids, text[: -max(map(len, stops))], "stop")
        if len(ids) == params.max_tokens:
            return Expected(ids, text, "length")
