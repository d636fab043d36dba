"""Aborts, failures and broken hand-offs: one end for each request, and all memory back."""

from collections.abc import Callable

import pytest
import torch

from workers.native.engine.errors import EngineStoppedError
from workers.native.handoff.errors import HandoffBroken
from workers.native.handoff.reference import hash_prompt
from workers.native.sampling.params import SamplingParams
from workers.native.testing.driven_core import DrivenCore, Received, answer_alone

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]
LONG = SamplingParams(temperature=0.0, max_tokens=15, ignore_eos=True)


def new_core(blocks: int = 12, step_tokens: int = 4) -> DrivenCore:
    return DrivenCore(blocks=blocks, step_tokens=step_tokens)


def assert_clean(driven: DrivenCore, ends: dict[str, int]) -> None:
    driven.run()
    assert driven.core.memory.table.used == 0
    assert not driven.core.running
    assert not driven.core.waiting
    assert driven.core.stats.finished == ends


@pytest.mark.parametrize("steps,tokens", [(0, 0), (1, 0), (3, 1), (6, 4)])
def test_abort_while_waiting_prefilling_and_decoding(steps: int, tokens: int) -> None:
    driven = new_core()
    received = driven.add("r", PROMPT, LONG)
    for _ in range(steps):
        driven.step()
    assert len(received.ids()) == tokens
    driven.core.abort("r")
    received.closed = True
    driven.core.abort("r")
    assert_clean(driven, {"abort": 1})


def test_a_failed_step_after_an_abort_says_nothing_more() -> None:
    driven = new_core()
    received, sequence, pull = driven.add_pulled("r", PROMPT, LONG)
    driven.add("other", PROMPT, LONG)
    driven.step()
    driven.core.abort("r")
    received.closed = True
    driven.model.fail_next = True
    driven.step()
    driven.spoil(sequence, pull)
    assert_clean(driven, {"abort": 1})


def test_abort_takes_all_choices_and_nobody_else() -> None:
    driven = new_core()
    received = driven.add("r", PROMPT, LONG, choices=3)
    other = driven.add("other", PROMPT[:5], LONG)
    for _ in range(6):
        driven.step()
    assert received.ids(2)
    driven.core.abort("r")
    received.closed = True
    assert_clean(driven, {"abort": 3, "length": 1})
    assert len(other.ids()) == 15


def test_abort_of_a_pull_that_waits_for_room() -> None:
    driven = new_core(blocks=6, step_tokens=16)
    driven.add("first", PROMPT, LONG)
    driven.step()
    received, sequence, pull = driven.add_pulled("r", [7] * 16, LONG)
    driven.step()
    assert pull.target is None
    driven.core.abort("r")
    received.closed = True
    assert pull.cancelled
    driven.spoil(sequence, pull)
    assert_clean(driven, {"abort": 1, "length": 1})


@pytest.mark.parametrize("lands", [True, False])
def test_abort_of_a_running_pull_keeps_its_blocks_until_its_thread_is_done(lands: bool) -> None:
    driven = new_core()
    received, sequence, pull = driven.add_pulled("r", PROMPT, LONG)
    driven.step()
    driven.core.abort("r")
    received.closed = True
    assert pull.cancelled
    driven.run()
    assert driven.core.memory.table.used == 3
    (driven.land if lands else driven.spoil)(sequence, pull)
    assert_clean(driven, {"abort": 1})


def test_a_pull_that_fails_at_once_or_late() -> None:
    driven = new_core()
    early, sequence, pull = driven.add_pulled("early", PROMPT, LONG, choices=3)
    driven.spoil(sequence, pull)
    driven.deliver()
    late, sequence, pull = driven.add_pulled("late", PROMPT, LONG, choices=3)
    driven.step()
    driven.spoil(sequence, pull)
    driven.deliver()
    for received in (early, late):
        assert [type(error) for error in received.failures] == [HandoffBroken]
        assert received.tokens == {}
    assert driven.core.stats.pull_failures == 2
    assert_clean(driven, {"error": 2})


def test_what_a_broken_pull_left_behind_spoils_nobody() -> None:
    driven = new_core(blocks=8, step_tokens=16)
    long = driven.add("long", PROMPT, LONG)
    driven.step()
    _, sequence, pull = driven.add_pulled("broken", [7] * 8, LONG)
    driven.step()
    driven.spoil(sequence, pull)  # NaN everywhere
    driven.deliver()
    short = driven.add("short", [7, 8], SamplingParams(temperature=0.0, max_tokens=5))
    driven.run()
    assert torch.isfinite(driven.pool.tensor).all()
    for received, prompt, params in ((long, PROMPT, LONG), (short, [7, 8], short_params())):
        finish = received.finish[0]
        assert finish in ("length", "stop")
        expected = answer_alone(driven.model.logits_after, prompt, params, eos=eos_of(params))
        assert received.ids() == expected.ids


def short_params() -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=5)


def eos_of(params: SamplingParams) -> frozenset[int]:
    return frozenset() if params.ignore_eos else frozenset({0})


def busy_core() -> tuple[DrivenCore, dict[str, Received], Callable[[], None]]:
    """One request in every state; the callable ends its pulls."""
    driven = new_core(blocks=14, step_tokens=4)
    seen = {"decoding": driven.add("decoding", [5], LONG, choices=2)}
    driven.step()
    seen["pulling"], sequence, pull = driven.add_pulled("pulling", PROMPT, LONG)
    driven.step()
    seen["prefilling"] = driven.add("prefilling", PROMPT[::-1], LONG)
    seen["offered"], _ = driven.add_offer("offered", PROMPT[2:])
    driven.step()
    seen["waiting"] = driven.add("waiting", [8] * 30, LONG, choices=3)
    seen["pull waits"], sequence_2, pull_2 = driven.add_pulled("pull waits", [9] * 30, LONG)
    seen["offer waits"], _ = driven.add_offer("offer waits", [10] * 30)
    assert len(driven.core.running) == 5
    assert len(driven.core.waiting) == 3

    def end_pulls() -> None:
        assert pull.cancelled
        assert pull_2.cancelled
        driven.spoil(sequence, pull)
        driven.spoil(sequence_2, pull_2)
        driven.deliver()

    return driven, seen, end_pulls


def test_a_failed_step_ends_everything_once_and_the_next_request_is_served() -> None:
    driven, seen, end_pulls = busy_core()
    driven.model.fail_next = True
    driven.step()
    end_pulls()
    for name, received in seen.items():
        expected = 2 if name == "decoding" else 1  # one for each choice that had begun
        assert len(received.failures) == expected, name
        assert isinstance(received.failures[0], EngineStoppedError), name
        assert received.finish == {}
        received.closed = True
    driven.run()
    assert driven.core.memory.table.used == 0
    assert driven.offers.live == 0
    after = driven.add("after", PROMPT, short_params())
    driven.run()
    alone = answer_alone(driven.model.logits_after, PROMPT, short_params())
    assert (after.ids(), after.finish) == (alone.ids, {0: alone.finish})


def test_a_failed_step_leaves_finished_offers_to_their_readers() -> None:
    driven = new_core(step_tokens=16)
    _, offer = driven.add_offer("p", PROMPT)
    driven.step()
    driven.add("r", [1], LONG)
    driven.model.fail_next = True
    driven.step()
    assert driven.offers.claim(offer.offer_id, offer.key, hash_prompt(PROMPT)) is offer
    assert driven.model.holds(driven.pool, PROMPT, offer.blocks)
    assert driven.core.memory.table.used == 3
    offer.stop_reading("read")
    driven.run()
    assert driven.core.memory.table.used == 0


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_an_offer_that_ends_early_tells_its_router(steps: int) -> None:
    driven = new_core()
    received, offer = driven.add_offer("p", PROMPT)
    for _ in range(steps):
        driven.step()
    driven.now_s += 31
    assert driven.offers.expire() == 1
    driven.run()
    assert [str(error) for error in received.failures] == ["the offer ended early: expired"]
    assert driven.core.memory.table.used == 0
    assert driven.offers.ended == {"expired": 1}
    assert offer.ended == "expired"


@pytest.mark.parametrize("reading", [False, True])
def test_an_aborted_prefill_frees_its_blocks_when_its_reader_is_gone(reading: bool) -> None:
    driven = new_core()
    received, offer = driven.add_offer("p", PROMPT)
    driven.step()
    if reading:
        driven.offers.claim(offer.offer_id, offer.key, hash_prompt(PROMPT))
    driven.core.abort("p")
    received.closed = True
    driven.deliver()
    assert driven.core.memory.table.used == (3 if reading else 0)
    assert offer.failure == "the prefill request was cancelled"
    if reading:
        offer.stop_reading("peer lost")
    assert_clean(driven, {"abort": 1})
    assert driven.offers.ended == {"the prefill request was cancelled": 1}


def test_requests_wait_for_offers_to_be_read() -> None:
    driven = new_core(blocks=3, step_tokens=16)
    _, offer = driven.add_offer("p", PROMPT)
    driven.run()
    received = driven.add("r", PROMPT[::-1], SamplingParams(temperature=0.0, max_tokens=2))
    assert driven.step() is False
    assert received.ids() == []
    driven.offers.release(offer.offer_id)
    assert driven.step() is True
    driven.run()
    assert received.finish
    assert driven.core.memory.table.used == 0
