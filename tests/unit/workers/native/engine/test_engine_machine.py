"""Any order of requests, hand-offs, aborts and failures: right answers, one end each, no leak."""

from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from workers.native.engine.sequence import Sequence
from workers.native.handoff.offers import Offer
from workers.native.handoff.reference import hash_prompt
from workers.native.sampling.params import SamplingParams
from workers.native.testing.driven_core import DrivenCore, HeldPull, Received, answer_alone

BLOCK_TOKENS = 4
COMMON = list(range(1, 11))  # most prompts share a beginning of this
prompts = st.builds(
    lambda shared, tail: [*COMMON[:shared], *tail] or [1],
    st.sampled_from([0, 4, 8, 8, 10]),
    st.lists(st.integers(1, 11), max_size=5),
)
params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 3),
    max_tokens=st.integers(1, 8),
    min_tokens=st.sampled_from([0, 0, 3]),
    stop=st.sampled_from([(), (), ("de", "ef", "g")]),
)


@dataclass
class Request:
    """One request as the machine knows it."""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    choices: int
    received: Received


@dataclass
class PullJob:
    sequence: Sequence
    pull: HeldPull
    ended: bool = False


class EngineMachine(RuleBasedStateMachine):
    """The machine is every client, every peer, and the thread."""

    @initialize(
        blocks=st.integers(8, 14), step_tokens=st.integers(3, 16), max_running=st.integers(1, 5)
    )
    def start(self, blocks: int, step_tokens: int, max_running: int) -> None:
        self.driven = DrivenCore(blocks=blocks, step_tokens=step_tokens, max_running=max_running)
        self.requests: list[Request] = []
        self.pulls: list[PullJob] = []
        self.offers: list[tuple[Offer, list[int], Received, str]] = []
        self.count = 0

    def new_id(self) -> str:
        self.count += 1
        return f"r{self.count}"

    # --- requests -------------------------------------------------------------------------------

    @rule(prompt=prompts, wishes=params, choices=st.sampled_from([1, 1, 3]))
    def ask(self, prompt: list[int], wishes: SamplingParams, choices: int) -> None:
        name = self.new_id()
        received = self.driven.add(name, prompt, wishes, choices=choices)
        self.requests.append(Request(name, prompt, wishes, choices, received))

    @rule(prompt=prompts, wishes=params, choices=st.sampled_from([1, 1, 3]))
    def ask_split(self, prompt: list[int], wishes: SamplingParams, choices: int) -> None:
        name = self.new_id()
        received, sequence, pull = self.driven.add_pulled(name, prompt, wishes, choices=choices)
        self.requests.append(Request(name, prompt, wishes, choices, received))
        self.pulls.append(PullJob(sequence, pull))

    @rule(prompt=prompts)
    def offer(self, prompt: list[int]) -> None:
        name = self.new_id()
        received, offer = self.driven.add_offer(name, prompt)
        self.offers.append((offer, prompt, received, name))

    @rule(data=st.data())
    @precondition(lambda self: self.count)
    def abort(self, data: st.DataObject) -> None:
        live = [s.request_id for s in (*self.driven.core.running, *self.driven.core.waiting)]
        names = live or [f"r{number + 1}" for number in range(self.count)]
        name = data.draw(st.sampled_from(names))
        self.driven.core.abort(name)
        for request in self.requests:
            if request.request_id == name:
                request.received.closed = True
        for job in self.open_pulls(begun=False):
            assert job.pull.cancelled or job.sequence.request_id != name

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.driven.step()

    @rule()
    @precondition(lambda self: self.count % 6 == 5)  # not often: it ends nearly everything
    def step_fails(self) -> None:
        self.driven.model.fail_next = True
        self.driven.step()
        self.driven.model.fail_next = False

    # --- hand-offs in ---------------------------------------------------------------------------

    def open_pulls(self, *, begun: bool) -> list[PullJob]:
        return [j for j in self.pulls if not j.ended and (j.pull.target is not None or not begun)]

    @rule(data=st.data())
    @precondition(lambda self: self.open_pulls(begun=True))
    def pull_lands(self, data: st.DataObject) -> None:
        self.end_pull(data.draw(st.sampled_from(self.open_pulls(begun=True))), good=True)

    @rule(data=st.data())
    @precondition(lambda self: self.open_pulls(begun=False))
    def pull_fails(self, data: st.DataObject) -> None:
        self.end_pull(data.draw(st.sampled_from(self.open_pulls(begun=False))), good=False)

    def end_pull(self, job: PullJob, *, good: bool) -> None:
        if job.pull.target is not None:
            blocks, _ = job.pull.target
            assert set(blocks) <= set(job.sequence.blocks), "blocks were taken from a running pull"
            others = [s for s in self.driven.sequences if s is not job.sequence]
            assert not any(set(blocks) & set(s.blocks) for s in others), "it would spoil others"
        job.ended = True
        (self.driven.land if good else self.driven.spoil)(job.sequence, job.pull)

    # --- hand-offs out --------------------------------------------------------------------------

    def open_offers(self) -> list[tuple[Offer, list[int], Received, str]]:
        return [entry for entry in self.offers if not entry[0].ended or entry[0].reading]

    @rule(data=st.data())
    @precondition(lambda self: self.open_offers())
    def reader_comes(self, data: st.DataObject) -> None:
        offer, prompt, _, _ = data.draw(st.sampled_from(self.open_offers()))
        if not offer.reading and not offer.ended:
            claimed = self.driven.offers.claim(offer.offer_id, offer.key, hash_prompt(prompt))
            assert claimed is offer

    @rule(data=st.data())
    @precondition(lambda self: self.open_offers())
    def reader_leaves(self, data: st.DataObject) -> None:
        offer, prompt, _, _ = data.draw(st.sampled_from(self.open_offers()))
        if not offer.reading:
            return
        self.look_at(offer, prompt)
        offer.stop_reading("peer lost" if offer.logits is None else "read")

    def look_at(self, offer: Offer, prompt: list[int]) -> None:
        known = prompt[: len(offer.blocks) * BLOCK_TOKENS]
        assert self.driven.model.holds(self.driven.pool, known, offer.blocks)
        if offer.logits is not None:
            assert len(offer.blocks) == -(-len(prompt) // BLOCK_TOKENS)
            exact = self.driven.model.logits_after(prompt)
            assert bytes(offer.logits) == exact.numpy().tobytes()

    @rule(data=st.data())
    @precondition(lambda self: self.open_offers())
    def router_releases(self, data: st.DataObject) -> None:
        offer, _, _, _ = data.draw(st.sampled_from(self.open_offers()))
        self.driven.offers.release(offer.offer_id)

    @rule()
    def time_passes(self) -> None:
        self.driven.now_s += 31
        self.driven.offers.expire()

    # --- what must always hold ------------------------------------------------------------------

    @invariant()
    def blocks_are_accounted_for(self) -> None:
        held = {block for sequence in self.driven.sequences for block in sequence.blocks}
        assert self.driven.core.memory.table.used == len(held)

    @invariant()
    def what_is_offered_is_right(self) -> None:
        held = {block for sequence in self.driven.sequences for block in sequence.blocks}
        for offer, prompt, _, _ in self.open_offers():
            assert set(offer.blocks) <= held
            self.look_at(offer, prompt)

    def teardown(self) -> None:
        if hasattr(self, "driven"):
            self.wind_up()
            self.check_requests()
            self.check_offers()
            self.driven.pool.close()

    def wind_up(self) -> None:
        core = self.driven.core
        for _ in range(500):
            if not self.driven.step():
                self.time_passes()  # offers that nobody reads may hold the last blocks
            for job in self.open_pulls(begun=True):
                self.end_pull(job, good=True)
            for job in self.open_pulls(begun=False):
                if job.pull.cancelled:
                    self.end_pull(job, good=False)
            for offer, prompt, _, _ in self.open_offers():
                self.look_at(offer, prompt)
                if offer.reading:
                    offer.stop_reading("peer lost" if offer.logits is None else "read")
            if not core.running and not core.waiting and not self.driven.orders:
                break
        self.time_passes()
        self.driven.deliver()
        assert not core.running
        assert not core.waiting
        assert not self.open_pulls(begun=True)
        assert core.memory.table.used == 0
        assert self.driven.offers.live == 0

    def check_requests(self) -> None:
        for request in self.requests:
            received = request.received
            for choice in range(request.choices):
                alone = answer_alone(
                    self.driven.model.logits_after, request.prompt, request.params, fork=choice
                )
                ids = received.ids(choice)
                if choice in received.finish:
                    assert received.finish[choice] == alone.finish
                    assert ids == alone.ids
                    assert received.text(choice) == alone.text
                else:  # it was cut short, and was right as far as it went
                    assert received.closed or received.failures
                    assert ids == alone.ids[: len(ids)]
            assert len(received.reports) <= 1
            assert len(received.failures) <= max(1, request.choices - len(received.finish))

    def check_offers(self) -> None:
        for offer, _, received, _ in self.offers:
            assert offer.ended
            assert len(received.reports) + len(received.failures) <= 1
            if offer.ended == "read":
                assert received.reports


EngineMachine.TestCase.settings = settings(
    max_examples=50, stateful_step_count=50, deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)  # fmt: skip
# Only a failure takes long: the shortest way to it is looked for.
TestEngine = pytest.mark.timeout(900)(EngineMachine.TestCase)
