"""The engine against a slow one that looks at every sequence and every token in every step."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.performance.coefficients import Coefficients, area
from splitserve.simulation.engine import SimulatedEngine
from splitserve.simulation.job import EngineShape, Job, Stage

SPEED = Coefficients(0.016, 5e-5, 1.7e-7, 0.010, 8e-5, 4e-9)


@dataclass(eq=False)
class Sequence:
    number: int
    prompt: int
    output: int
    priority: int
    written: int = 0  # tokens whose KV is there
    said: int = 0
    blocks: int = 0
    decodes: bool = False
    first_s: float | None = None


@dataclass
class SlowEngine:
    """The rules of the module docstring, written down as directly as can be."""

    speed: Coefficients
    shape: EngineShape
    running: list[Sequence] = field(default_factory=list)
    waiting: list[Sequence] = field(default_factory=list)
    preemptions: int = 0
    most_blocks: int = 0

    @property
    def room(self) -> int:
        return self.shape.kv_tokens // self.shape.block_tokens

    @property
    def used(self) -> int:
        return sum(sequence.blocks for sequence in self.running)

    def blocks(self, tokens: int) -> int:
        return (tokens + self.shape.block_tokens - 1) // self.shape.block_tokens

    def step(self) -> tuple[float, dict[Sequence, int]] | None:
        before = self.preemptions
        rows: dict[Sequence, int] = {}
        for sequence in [s for s in self.running if s.decodes]:
            if sequence in self.running and self.grow(sequence, sequence.written + 1, rows):
                rows[sequence] = 1
        left = self.speed.budget_tokens - len(rows)
        for sequence in list(self.running):
            if sequence.decodes or sequence not in self.running or left <= 0:
                continue
            wanted = min(left, sequence.prompt + sequence.said - sequence.written)
            if self.grow(sequence, sequence.written + wanted, rows):
                rows[sequence] = wanted
                left -= wanted
        while left > 0 and self.waiting and self.preemptions == before:
            sequence = min(self.waiting, key=self.rank)
            target = sequence.prompt + sequence.said
            asked = target if self.shape.reserve_prompt else min(left, target)
            if len(self.running) >= self.shape.max_sequences:
                break
            if self.used + self.blocks(asked) > self.room:
                break
            self.waiting.remove(sequence)
            self.running.append(sequence)
            sequence.blocks = self.blocks(asked)
            rows[sequence] = min(left, target)
            left -= rows[sequence]
        self.most_blocks = max(self.most_blocks, self.used)
        return (self.duration(rows), rows) if rows else None

    def rank(self, sequence: Sequence) -> tuple[int, int]:
        return (sequence.priority if self.shape.priority else 0, sequence.number)

    def grow(self, sequence: Sequence, tokens: int, rows: dict[Sequence, int]) -> bool:
        """Have blocks for `tokens`; False when the sequence itself had to give way."""
        while True:
            need = max(0, self.blocks(tokens) - sequence.blocks)
            if self.used + need <= self.room:
                sequence.blocks += need
                return True
            victim = self.running[-1]
            if self.shape.priority:
                worst = max(s.priority for s in self.running)
                victim = [s for s in self.running if s.priority == worst][-1]
            self.preemptions += 1
            self.running.remove(victim)
            self.waiting.append(victim)
            rows.pop(victim, None)
            victim.written = victim.blocks = 0
            victim.decodes = False
            if victim is sequence:
                return False

    def duration(self, rows: dict[Sequence, int]) -> float:
        decodes = [s for s in rows if s.decodes]
        prompts = [s for s in rows if s not in decodes]
        return self.speed.step_of(
            sum(rows[s] for s in prompts),
            sum(area(rows[s], s.written) for s in prompts),
            len(decodes),
            sum(s.prompt + s.said for s in decodes),
        )

    def end(self, rows: dict[Sequence, int], now_s: float) -> list[Sequence]:
        finished = []
        for sequence, count in rows.items():
            sequence.written += count
            if sequence.written == sequence.prompt + sequence.said:
                sequence.said += 1
                sequence.decodes = True
                if sequence.first_s is None:
                    sequence.first_s = now_s
                if sequence.said == sequence.output:
                    finished.append(sequence)
                    self.running.remove(sequence)
                    sequence.blocks = 0
        return finished


Load = list[tuple[float, int, int, int]]  # at, prompt, output, priority
Times = dict[int, tuple[float, float]]


def play_slow(load: Load, speed: Coefficients, shape: EngineShape) -> tuple[Times, int, int]:
    engine, times, now_s = SlowEngine(speed, shape), {}, 0.0
    coming = [Sequence(n, *sizes[1:]) for n, sizes in enumerate(load)]
    while coming or engine.running or engine.waiting:
        while coming and load[coming[0].number][0] <= now_s:
            engine.waiting.append(coming.pop(0))
        step = engine.step()
        if step is None:
            now_s = load[coming[0].number][0]
            continue
        now_s += step[0]
        for sequence in engine.end(step[1], now_s):
            assert sequence.first_s is not None
            times[sequence.number] = (sequence.first_s, now_s)
    return times, engine.preemptions, engine.most_blocks


def play(load: Load, speed: Coefficients, shape: EngineShape) -> tuple[Times, int, int]:
    engine = SimulatedEngine(speed, shape, lambda: 1.0)
    first: dict[int, float] = {}
    times: Times = {}
    now_s, most_blocks, arrived = 0.0, 0, 0
    while arrived < len(load) or engine.running or engine.waiting:
        while arrived < len(load) and load[arrived][0] <= now_s:
            _, prompt, output, priority = load[arrived]
            engine.add(Job((str(arrived), 1), prompt, output, priority))
            arrived += 1
        duration_s = engine.plan_step()
        if duration_s is None:
            now_s = load[arrived][0]
            continue
        most_blocks = max(most_blocks, engine.used_blocks)
        now_s += duration_s
        result = engine.end_step(now_s)
        for job in result.first:
            first[int(job.key[0])] = now_s
        for job in result.finished:
            number = int(job.key[0])
            assert number not in times, "a job ended twice"
            assert job.stage is Stage.GONE
            times[number] = (first[number], now_s)
            said = sum(last - begin + 1 for begin, last in job.bursts)
            assert said == load[number][2], "its steps do not add up to its answer"
            assert engine.ended_s[job.bursts[-1][1] - 1] == now_s
    assert engine.used_blocks == 0
    assert engine.decoding == engine.kv_decoding == 0
    return times, engine.preemptions, most_blocks


@st.composite
def loads(draw: st.DrawFn) -> Load:
    sizes = (st.floats(0, 1.5), st.integers(1, 90), st.integers(1, 60), st.sampled_from([0, 10]))
    requests = draw(st.lists(st.tuples(*sizes), min_size=1, max_size=14))
    return sorted(requests, key=lambda r: r[0])


@st.composite
def shapes(draw: st.DrawFn) -> EngineShape:
    block_tokens = draw(st.sampled_from([1, 7, 16]))
    least = 150 + 2 * block_tokens  # any one job fits
    kv_tokens = max(least, block_tokens * draw(st.integers(10, 40)))
    flags = st.booleans()
    sequences = draw(st.integers(1, 8))
    return EngineShape(kv_tokens, sequences, block_tokens, draw(flags), draw(flags))


@given(load=loads(), shape=shapes(), budget=st.integers(8, 64))
@settings(max_examples=300, deadline=None)
def test_same_times_as_the_slow_engine(load: Load, shape: EngineShape, budget: int) -> None:
    speed = replace(SPEED, budget_tokens=budget)
    times, preemptions, most_blocks = play(load, speed, shape)
    slow_times, slow_preemptions, slow_blocks = play_slow(load, speed, shape)
    assert sorted(times) == list(range(len(load))), "every job ends once"
    assert (preemptions, most_blocks) == (slow_preemptions, slow_blocks)
    assert most_blocks <= shape.kv_tokens // shape.block_tokens
    for number, pair in times.items():
        for mine_s, slow_s in zip(pair, slow_times[number], strict=True):
            assert abs(mine_s - slow_s) < 1e-9
