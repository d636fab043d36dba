"""A continuous-batching engine as a step loop: token budget, chunked prefill, KV, preemption.

The order of work is vLLM's: running sequences first (a decode takes one token of the budget, an
unfinished prompt what is left), then waiting ones while budget, sequences and KV allow, unless
memory ran short in this step. When a block is needed and none is free, the sequence admitted last
gives up its KV and computes it again later.

A step's duration is the latency model's; nothing is sampled but the noise on it. A decode step
costs O(1): every decoding sequence advances by one, so only the next to finish need be known, and
how many of them start a new block.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable

from splitserve.performance.coefficients import Coefficients, area
from splitserve.prefix.index import PrefixIndex
from splitserve.simulation.job import HASH_BLOCK_TOKENS, EngineShape, Job, Stage, StepResult

__all__ = ["EngineShape", "Job", "SimulatedEngine", "Stage", "StepResult"]


class SimulatedEngine:
    """One engine. `plan_step` starts a step, `end_step` delivers it after its duration."""

    def __init__(
        self, coefficients: Coefficients, shape: EngineShape, noise: Callable[[], float]
    ) -> None:
        self.coefficients = coefficients
        self.shape = shape
        self.steps = 0
        self.ended_s: list[float] = []  # when each step ended
        self.decoding = 0  # sequences that decode
        self.kv_decoding = 0  # tokens they hold
        self.used_blocks = 0
        self.preemptions = 0
        self.waiting = 0
        self.prompts: list[Job] = []
        self._noise = noise
        self._blocks_total = shape.kv_tokens // shape.block_tokens
        self._heap: list[tuple[int, int, Job]] = []  # the waiting, by priority, then age
        self._pulls: deque[Job] = deque()
        self._running: dict[int, Job] = {}  # prompts and decodes, by admission
        self._ends: list[tuple[int, int, Job]] = []
        self._phases = [0] * shape.block_tokens  # decodes by (tokens - steps) modulo block
        self._chunks: list[tuple[Job, int]] = []
        self._orders = 0
        self._grown = False  # the decodes of the step under way have their blocks
        self._prefix = PrefixIndex()
        self._prefix.bound("", max(1, shape.kv_tokens // HASH_BLOCK_TOKENS))

    @property
    def running(self) -> int:
        """Sequences that the engine works on."""
        return len(self._running)

    @property
    def kv_used_tokens(self) -> int:
        """Tokens' worth of blocks that are taken."""
        return self.used_blocks * self.shape.block_tokens

    # --- jobs come and go -----------------------------------------------------------------------

    def fits(self, job: Job) -> bool:
        """False for a job that this engine could never finish."""
        tokens = job.prompt_tokens + (0 if job.prefill_only else job.output_tokens)
        return self._blocks(tokens) <= self._blocks_total

    def add(self, job: Job) -> None:
        """Queue a job whose prompt is to be computed here."""
        self._orders += 1
        job.order = self._orders
        self._wait(job)

    def pull(self, job: Job) -> None:
        """Queue a job whose KV comes from elsewhere, once there is room for it."""
        self._orders += 1
        job.order = self._orders
        job.stage = Stage.WAITING
        self._pulls.append(job)

    def admit_pulls(self) -> list[Job]:
        """Give blocks to jobs whose KV may come now, and return them."""
        admitted: list[Job] = []
        while self._pulls:
            job = self._pulls[0]
            if job.stage is Stage.WAITING:
                need = self._blocks(job.prompt_tokens)
                if self.used_blocks + need > self._blocks_total:
                    break
                self.used_blocks += need
                job.prompt_blocks = need
                job.stage = Stage.PULLING
                job.cached_tokens = min(self._match(job), job.prompt_tokens)
                admitted.append(job)
            self._pulls.popleft()
        return admitted

    def land(self, job: Job) -> None:
        """The KV of a pulled job is here: its last prompt token gives the first output."""
        if job.stage is Stage.PULLING:
            job.computed = job.prompt_tokens - 1
            self._admit(job)

    def release(self, job: Job) -> None:
        """The other worker has the KV of this finished prompt."""
        if job.stage is Stage.HELD:
            self.used_blocks -= job.prompt_blocks
            job.stage = Stage.GONE

    def drop(self, job: Job) -> None:
        """Forget a job, wherever it is."""
        match job.stage:
            case Stage.WAITING:
                if job.pulled and job in self._pulls:
                    self._pulls.remove(job)
                else:
                    self.waiting -= 1
            case Stage.PULLING | Stage.HELD:
                self.used_blocks -= job.prompt_blocks
            case Stage.PROMPT:
                self._leave_prompts(job)
            case Stage.DECODING:
                self._leave_decodes(job)
            case Stage.GONE:
                pass
        job.stage = Stage.GONE

    # --- one step -------------------------------------------------------------------------------

    def plan_step(self) -> float | None:
        """Choose the step's work; return its duration in seconds, or None when there is none."""
        before = self.preemptions
        self._make_room()
        left = self.coefficients.budget_tokens - self.decoding
        self._chunks = []
        for job in tuple(self.prompts):
            if left <= 0:
                break
            if job.stage is Stage.PROMPT:  # else preempted for one before it
                left -= self._chunk(job, left)
        while left > 0 and self.waiting and self.preemptions == before:
            admitted = self._admit_next(left)
            if admitted is None:
                break
            left -= self._chunk(admitted, left)
        if not self._chunks and not self.decoding:
            return None
        prompt_tokens, prompt_area = 0, 0.0
        for job, rows in self._chunks:
            prompt_tokens += rows
            prompt_area += area(rows, job.computed)
        duration_s = self.coefficients.step_of(
            prompt_tokens, prompt_area, self.decoding, self.kv_decoding
        )
        return duration_s * self._noise()

    def end_step(self, now_s: float) -> StepResult:
        """Advance everything by the step planned last, which ends now."""
        self.steps += 1
        self._grown = False
        self.ended_s.append(now_s)
        self.kv_decoding += self.decoding
        finished: list[Job] = []
        while self._ends and self._ends[0][0] <= self.steps:
            job = heapq.heappop(self._ends)[2]
            if job.stage is Stage.DECODING and job.ends_step == self.steps:
                finished.append(job)
        first: list[Job] = []
        prefilled: list[Job] = []
        for job, rows in self._chunks:
            job.computed += rows
            if job.computed >= job.target:
                self._prompt_done(job, first, prefilled, finished)
        self._chunks = []
        for job in finished:
            if job.stage is Stage.DECODING:
                self._leave_decodes(job)
            job.stage = Stage.GONE
        return StepResult(tuple(first), tuple(prefilled), tuple(finished))

    def _chunk(self, job: Job, left: int) -> int:
        """Plan the next rows of a prompt, at most `left`; 0 where memory for them cannot be had."""
        rows = min(left, job.target - job.computed)
        need = self._blocks(job.computed + rows) - job.prompt_blocks
        if need > 0:
            while self.used_blocks + need > self._blocks_total:
                if self._preempt() is job:
                    return 0
            self.used_blocks += need
            job.prompt_blocks += need
        self._chunks.append((job, rows))
        return rows

    def _prompt_done(
        self, job: Job, first: list[Job], prefilled: list[Job], finished: list[Job]
    ) -> None:
        self.prompts.remove(job)
        if job.prefill_only:
            del self._running[job.admitted]
            job.stage = Stage.HELD
            prefilled.append(job)
            return
        if job.emitted == 0:
            first.append(job)
        job.emitted += 1
        if job.emitted >= job.output_tokens:
            del self._running[job.admitted]
            self.used_blocks -= job.prompt_blocks
            job.bursts.append((self.steps, self.steps))
            finished.append(job)
            return
        job.stage = Stage.DECODING
        job.joined_step = self.steps
        job.ends_step = self.steps + job.output_tokens - job.emitted
        self.decoding += 1
        self.kv_decoding += job.target
        self._phases[(job.target - self.steps) % self.shape.block_tokens] += 1
        heapq.heappush(self._ends, (job.ends_step, job.admitted, job))

    # --- admission ------------------------------------------------------------------------------

    def _wait(self, job: Job) -> None:
        job.stage = Stage.WAITING
        self.waiting += 1
        heapq.heappush(self._heap, (self._rank(job), job.order, job))

    def _rank(self, job: Job) -> int:
        return job.priority if self.shape.priority else 0

    def _admit_next(self, left: int) -> Job | None:
        """Take the next waiting job, if a sequence and memory are free."""
        while self._heap[0][2].stage is not Stage.WAITING:
            heapq.heappop(self._heap)
        job = self._heap[0][2]
        first_tokens = job.target if self.shape.reserve_prompt else min(left, job.target)
        need = self._blocks(first_tokens)
        if len(self._running) >= self.shape.max_sequences:
            return None
        if self.used_blocks + need > self._blocks_total:
            return None
        heapq.heappop(self._heap)
        self.waiting -= 1
        self.used_blocks += need
        job.prompt_blocks = need
        job.computed = min(self._match(job), job.target - 1)
        if job.emitted == 0:
            job.cached_tokens = job.computed
        self._admit(job)
        return job

    def _admit(self, job: Job) -> None:
        self._orders += 1
        job.admitted = self._orders
        job.stage = Stage.PROMPT
        self._running[job.admitted] = job
        self.prompts.append(job)

    def _match(self, job: Job) -> int:
        """Tokens of the prompt that the prefix cache has; the prompt's blocks are in it then."""
        if not job.block_hashes:
            return 0
        hits = self._prefix.match("", job.block_hashes) * HASH_BLOCK_TOKENS
        self._prefix.add("", job.block_hashes)
        return hits

    # --- memory ---------------------------------------------------------------------------------

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.shape.block_tokens)

    def _make_room(self) -> None:
        """Take the blocks that this step's decodes need."""
        self._grown = False
        phase = (1 - self.steps) % self.shape.block_tokens
        while self.used_blocks + self._phases[phase] > self._blocks_total:
            self._preempt()
        self.used_blocks += self._phases[phase]
        self._grown = True

    def _preempt(self) -> Job:
        if self.shape.priority:
            victim = max(self._running.values(), key=lambda job: (job.priority, job.admitted))
        else:
            victim = next(reversed(self._running.values()))
        self.preemptions += 1
        if victim.stage is Stage.DECODING:
            self._leave_decodes(victim)
        else:
            self._leave_prompts(victim)
        victim.computed = 0
        self._wait(victim)
        return victim

    def _leave_prompts(self, job: Job) -> None:
        self.prompts.remove(job)
        del self._running[job.admitted]
        self.used_blocks -= job.prompt_blocks
        self._chunks = [(j, rows) for j, rows in self._chunks if j is not job]

    def _leave_decodes(self, job: Job) -> None:
        emitted = job.tokens_at(self.steps)
        tokens = job.prompt_tokens + emitted
        self.decoding -= 1
        self.kv_decoding -= tokens
        self._phases[(tokens - self.steps) % self.shape.block_tokens] -= 1
        # The newest token's own KV is written by the step after it.
        self.used_blocks -= self._blocks(tokens if self._grown else tokens - 1)
        del self._running[job.admitted]
        job.bursts.append((job.joined_step, self.steps))
        job.emitted = emitted
