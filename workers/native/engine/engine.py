"""The engine's thread: takes orders from any thread, runs `EngineCore` step by step.

Everything that touches sequences or blocks happens on this one thread; others put a small function
into its inbox.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from workers.native.engine.core import EngineCore, Model
from workers.native.engine.errors import EngineBusyError, EngineStoppedError, PromptTooLongError
from workers.native.engine.sequence import Sequence, Sink
from workers.native.engine.settings import EngineSettings
from workers.native.engine.stats import EngineStats
from workers.native.engine.text import Detokenizer, TextStream
from workers.native.handoff.offers import Offer, OfferTable
from workers.native.handoff.pull import Pull, end_of
from workers.native.handoff.reference import HandoffReference, hash_prompt
from workers.native.kv.pool import KvPool
from workers.native.sampling.params import SamplingParams

log = logging.getLogger("splitserve.engine")

Order = Callable[[EngineCore], None]


@dataclass(frozen=True, slots=True)
class Generation:
    """One prompt to answer `choices` times. `first_index` numbers its choices in the reply.

    `priority`: lower numbers are prefilled first, as in vLLM.
    `source` set: pull the prompt's KV instead of computing it. `prompt_logprobs` set: report
    log-probabilities of the prompt too, with that many rivals.
    """

    request_id: str
    prompt: list[int]
    params: SamplingParams
    sink: Sink
    choices: int = 1
    first_index: int = 0
    salt: bytes = b""
    source: HandoffReference | None = None
    prompt_logprobs: int | None = None
    priority: int = 0


class Engine:
    """Owns the core, its thread, and the offers that wait for decode workers."""

    def __init__(
        self,
        model: Model,
        pool: KvPool,
        settings: EngineSettings,
        *,
        eos: frozenset[int],
        model_hash: str,
        vocab_size: int,
        make_detokenizer: Callable[[], Detokenizer],
        allow_shared_memory: bool = True,
    ) -> None:
        capacity_tokens = pool.blocks * pool.layout.block_tokens
        context_tokens = min(settings.max_context_tokens or capacity_tokens, capacity_tokens)
        self.settings = replace(settings, max_context_tokens=context_tokens)
        self.pool = pool
        self.pairing_key = f"weights={model_hash};{pool.layout.describe()}"
        self.offers = OfferTable(settings.lease_s, time.monotonic)
        self._salt = model_hash.encode()
        self._logits_bytes = 4 * vocab_size
        self._make_detokenizer = make_detokenizer
        self._allow_shared_memory = allow_shared_memory
        self._core = EngineCore(model, pool, self.settings, eos, time.perf_counter)
        self._inbox: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._stopping = False
        self.failure = ""
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # --- from any thread ------------------------------------------------------------------------

    def start(self) -> None:
        """Warm up, then start the thread."""
        self._core.warm_up()
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        """End all requests and the thread."""
        self._stopping = True
        self._order(lambda core: None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    @property
    def alive(self) -> bool:
        """False once the thread has ended, whatever ended it."""
        return self._thread.is_alive() and not self._stopping

    def check_size(self, prompt_tokens: int, max_tokens: int | None) -> int:
        """Return the tokens an answer may have, or raise PromptTooLongError.

        None asks for all that is left of the context.
        """
        limit = self.settings.max_context_tokens
        left = limit - prompt_tokens
        if left < 1 or (max_tokens is not None and max_tokens > left):
            wanted = "" if max_tokens is None else f" and {max_tokens} of output"
            raise PromptTooLongError(
                f"this model's maximum context length is {limit} tokens, but the request has "
                f"{prompt_tokens} tokens of prompt{wanted}; shorten the prompt or max_tokens"
            )
        return left if max_tokens is None else max_tokens

    def generate(self, wish: Generation) -> None:
        """Queue a prompt; its outputs come to `wish.sink`, on the engine's thread."""
        self._check_open()
        now_s = time.perf_counter()
        parent, *siblings = [self._sequence(wish, fork, now_s) for fork in range(wish.choices)]
        parent.siblings = siblings
        parent.prompt_logprobs = wish.prompt_logprobs
        if wish.source is None:
            self._order(lambda core: core.add(parent))
            return
        parent.pull = self._pull(wish.source, wish.prompt)
        self._order(lambda core: core.add(parent))  # first: a pull may fail at once
        args = (parent, parent.pull)
        threading.Thread(target=self._carry, args=args, name="handoff-pull", daemon=True).start()

    def offer(self, wish: Generation) -> Offer:
        """Queue a prompt to prefill for another worker; its KV waits in the returned offer."""
        self._check_open()
        sequence = self._sequence(wish, 0, time.perf_counter())

        def ended(offer: Offer, reason: str) -> None:
            self._order(lambda core: core.offer_ended(sequence))

        offer = self.offers.make(hash_prompt(wish.prompt), len(wish.prompt), ended)
        sequence.offer = offer
        self._order(lambda core: core.add(sequence))
        return offer

    def abort(self, request_id: str) -> None:
        """End a request, if it still runs. Nothing more comes to its sink."""
        self._order(lambda core: core.abort(request_id))

    def stats(self) -> EngineStats:
        """Return the counters, gauges brought up to date."""
        core = self._core
        table = core.memory.table
        size = self.pool.layout.block_tokens
        stats = core.stats
        stats.running, stats.waiting = len(core.running), len(core.waiting)
        stats.kv_used_tokens = table.used * size
        stats.kv_cached_tokens = table.cached * size
        stats.evicted_blocks = table.evictions
        return stats

    # --- making sequences -----------------------------------------------------------------------

    def _check_open(self) -> None:
        if not self.alive:
            detail = self.failure or "the worker is shutting down"
            raise EngineStoppedError(f"the engine takes no more requests: {detail}")
        waiting = len(self._core.waiting) + self._inbox.qsize()
        if waiting >= self.settings.max_waiting:
            raise EngineBusyError(f"{waiting} requests wait already; try again later")

    def _sequence(self, wish: Generation, fork: int, now_s: float) -> Sequence:
        return Sequence(
            request_id=wish.request_id,
            index=wish.first_index + fork,
            fork=fork,
            prompt=wish.prompt,
            params=wish.params,
            sink=wish.sink,
            text=TextStream(self._make_detokenizer(), wish.params.stop),
            salt=self._salt + wish.salt,
            priority=wish.priority,
            arrived_s=now_s,
        )

    def _pull(self, source: HandoffReference, prompt: Seq[int]) -> Pull:
        return Pull(
            source,
            hash_prompt(prompt),
            len(prompt),
            self.pool,
            self.pairing_key,
            self._logits_bytes,
            time.perf_counter,
            timeout_s=self.settings.peer_timeout_s,
            allow_shared=self._allow_shared_memory,
        )

    def _carry(self, sequence: Sequence, pull: Pull) -> None:
        result = end_of(pull)
        self._order(lambda core: core.pull_ended(sequence, result))
        pull.close()  # the first token does not wait for it

    def _order(self, order: Order) -> None:
        self._inbox.put(order)

    # --- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        worked = True
        while not self._stopping:
            try:
                self._obey(wait=not worked)
                worked = self._core.step()
            except Exception as error:  # task boundary: one bad step must not end the worker
                log.exception("a step failed; its requests get this error")
                self._core.stats.failures += 1
                self._core.fail_all(EngineStoppedError(f"the engine's step failed: {error}"))
        self._obey(wait=False)  # whoever came in last must hear of it too
        self._core.fail_all(EngineStoppedError("the worker is shutting down"))

    def _obey(self, *, wait: bool) -> None:
        """Obey every order that has come in; with `wait`, at least one."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._inbox.get(block=wait)(self._core)
                wait = False
