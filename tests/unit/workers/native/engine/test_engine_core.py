"""The engine's step on chosen cases. Every answer is compared with one made without a cache."""

import random
from collections.abc import Callable

import pytest

from workers.native.engine.sequence import PromptLogprobs
from workers.native.handoff.errors import HandoffBroken
from workers.native.handoff.reference import hash_prompt
from workers.native.sampling.params import SamplingParams
from workers.native.sampling.sampler import rank_logprobs
from workers.native.testing.driven_core import DrivenCore, Received, answer_alone


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1, 12), k=length)


def greedy(max_tokens: int = 6, **more: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **more)  # type: ignore[arg-type]


def check(driven: DrivenCore, received: Received, prompt: list[int], params: SamplingParams,
          choices: int = 1) -> None:  # fmt: skip
    assert received.failures == []
    for choice in range(choices):
        alone = answer_alone(driven.model.logits_after, prompt, params, fork=choice)
        assert received.ids(choice) == alone.ids
        assert received.text(choice) == alone.text
        assert received.finish[choice] == alone.finish


def prompt_where(fits: Callable[[list[int]], bool], length: int = 5) -> list[int]:
    """The first prompt for which `fits` is true."""
    found = (prompt_of(length, seed) for seed in range(10_000))
    return next(prompt for prompt in found if fits(prompt))


@pytest.mark.parametrize("step_tokens", [3, 4, 5, 7, 8, 16])
def test_any_length_in_any_chunks_cold_and_warm(step_tokens: int) -> None:
    driven = DrivenCore(blocks=40, step_tokens=step_tokens)
    params = SamplingParams(seed=3, max_tokens=9)
    for length in (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 40):
        prompt = prompt_of(length, seed=length)
        for cached in (0, (length - 1) // 4 * 4):
            received = driven.add("r", prompt, params)
            driven.run()
            check(driven, received, prompt, params)
            assert received.reports[0].prompt_tokens == length
            assert received.reports[0].cached_tokens == cached
    assert driven.core.memory.table.used == 0


def test_generated_tokens_are_cached_too() -> None:
    driven = DrivenCore(blocks=20, step_tokens=16)
    params = greedy(max_tokens=8, min_tokens=8)
    first = driven.add("a", prompt_of(6), params)
    driven.run()
    prompt = [*prompt_of(6), *first.ids()]
    second = driven.add("b", prompt, params)
    driven.run()
    assert second.reports[0].cached_tokens == 12  # 13 have KV: the last one was never computed
    check(driven, second, prompt, params)


def test_salts_keep_caches_apart() -> None:
    driven = DrivenCore(blocks=20, step_tokens=16)
    for salt, cached in ((b"x", 0), (b"y", 0), (b"x", 8)):
        received = driven.add("r", prompt_of(9), greedy())
        driven.sequences[-1].salt = salt
        driven.run()
        assert received.reports[0].cached_tokens == cached


def test_batch_mates_change_nothing() -> None:
    driven = DrivenCore(blocks=100, step_tokens=11, max_running=20)
    asked = []
    for number in range(20):
        prompt = prompt_of(1 + number * 7 % 23, seed=number)
        params = SamplingParams(
            seed=number, max_tokens=1 + number % 9, temperature=(0.0, 1.0, 0.7)[number % 3],
            presence_penalty=number % 2, top_p=0.9, logprobs=2,
        )  # fmt: skip
        asked.append((driven.add(f"r{number}", prompt, params), prompt, params))
        driven.step()
    driven.run()
    for received, prompt, params in asked:
        check(driven, received, prompt, params)


@pytest.mark.parametrize("length", [1, 3, 4, 8, 9])
def test_three_choices_share_one_prompt(length: int) -> None:
    driven = DrivenCore(blocks=20, step_tokens=5)
    params = SamplingParams(seed=11, max_tokens=7)
    received = driven.add("r", prompt_of(length), params, choices=3)
    driven.run()
    check(driven, received, prompt_of(length), params, choices=3)
    assert len({tuple(received.ids(choice)) for choice in range(3)}) > 1
    assert len(received.reports) == 1
    assert driven.core.stats.prompt_tokens == length
    assert driven.core.memory.table.used == 0


def test_choices_that_find_no_room_wait_for_it() -> None:
    driven = DrivenCore(blocks=4, step_tokens=16)
    params = SamplingParams(seed=2, max_tokens=5, min_tokens=5)
    received = driven.add("r", prompt_of(11), params, choices=3)
    driven.run()
    check(driven, received, prompt_of(11), params, choices=3)
    assert driven.core.memory.table.used == 0


def test_a_full_cache_preempts_the_youngest_and_loses_nothing() -> None:
    driven = DrivenCore(blocks=6, step_tokens=16)
    params = SamplingParams(seed=4, max_tokens=12, min_tokens=12)
    old = driven.add("old", prompt_of(8, 1), params)
    young = driven.add("young", prompt_of(8, 2), params)
    finished: list[str] = []
    for _ in range(100):
        driven.step()
        finished += [
            n for n, r in (("old", old), ("young", young)) if r.finish and n not in finished
        ]
    assert finished == ["old", "young"]
    assert driven.core.stats.preemptions > 0
    check(driven, old, prompt_of(8, 1), params)
    check(driven, young, prompt_of(8, 2), params)
    assert len(young.reports) == 1


def test_the_oldest_cached_prompt_is_evicted() -> None:
    driven = DrivenCore(blocks=6, step_tokens=16)
    for seed, cached in ((1, 0), (2, 0), (3, 0), (1, 4)):  # 3 took the second block of 1
        received = driven.add("r", prompt_of(9, seed), greedy(max_tokens=2))
        driven.run()
        check(driven, received, prompt_of(9, seed), greedy(max_tokens=2))
        assert received.reports[0].cached_tokens == cached
    assert driven.core.memory.table.evictions == 2


def test_end_of_text_first() -> None:
    driven = DrivenCore(blocks=8, step_tokens=16)
    prompt = prompt_where(lambda p: int(driven.model.logits_after(p).argmax()) == 0)
    received = driven.add("r", prompt, greedy())
    driven.run()
    assert (received.ids(), received.text(), received.finish) == ([0], "", {0: "stop"})
    at_least = driven.add("r", prompt, greedy(min_tokens=2))
    driven.run()
    assert at_least.ids()[0] != 0
    check(driven, at_least, prompt, greedy(min_tokens=2))
    ignoring = driven.add("r", prompt, greedy(max_tokens=3, ignore_eos=True))
    driven.run()
    assert len(ignoring.ids()) == 3
    assert ignoring.finish == {0: "length"}


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_short_limits(max_tokens: int) -> None:
    driven = DrivenCore(blocks=8, step_tokens=16)
    prompt = prompt_where(
        lambda p: 0 not in answer_alone(driven.model.logits_after, p, greedy(2)).ids
    )
    received = driven.add("r", prompt, greedy(max_tokens), choices=2)
    driven.run()
    check(driven, received, prompt, greedy(max_tokens), choices=2)
    assert received.finish == {0: "length", 1: "length"}


def test_the_context_is_used_to_its_last_token() -> None:
    driven = DrivenCore(blocks=4, step_tokens=16)
    received = driven.add("r", prompt_of(10), greedy(max_tokens=99, ignore_eos=True))
    driven.run()
    assert len(received.ids()) == 6
    assert received.finish == {0: "length"}
    assert driven.core.memory.table.used == 0


def test_stop_tokens_and_stop_strings_over_several_tokens() -> None:
    driven = DrivenCore(blocks=12, step_tokens=16)
    free = greedy(max_tokens=9)
    prompt = prompt_where(lambda p: 0 not in answer_alone(driven.model.logits_after, p, free).ids)
    text = answer_alone(driven.model.logits_after, prompt, free).text
    stop = text[3:6]
    params = greedy(max_tokens=9, stop=("zz", stop))
    received = driven.add("r", prompt, params)
    driven.run()
    assert received.text() == text[: text.index(stop)]
    check(driven, received, prompt, params)
    third = answer_alone(driven.model.logits_after, prompt, free).ids[2]
    by_id = driven.add("r", prompt, greedy(max_tokens=9, stop_token_ids=frozenset({third})))
    driven.run()
    assert by_id.ids()[-1] == third
    assert by_id.text() == text[: len(by_id.ids()) - 1]
    assert by_id.finish == {0: "stop"}


def logprobs_alone(driven: DrivenCore, prompt: list[int], count: int) -> list[object]:
    rows = [driven.model.logits_after(prompt[:end]) for end in range(1, len(prompt))]
    return [rank_logprobs(row, token, count) for row, token in zip(rows, prompt[1:], strict=True)]


@pytest.mark.parametrize("step_tokens", [3, 16])
@pytest.mark.parametrize("length", [1, 4, 13])
def test_logprobs_of_a_prompt(length: int, step_tokens: int) -> None:
    driven = DrivenCore(blocks=12, step_tokens=step_tokens)
    prompt = prompt_of(length)
    for max_tokens in (3, 0):  # the second is not answered from the cache either
        received = driven.add("r", prompt, greedy(max_tokens), choices=2, prompt_logprobs=2)
        driven.run()
        [told] = received.prompt_logprobs
        assert told == PromptLogprobs(0, tuple(logprobs_alone(driven, prompt, 2)))  # type: ignore[arg-type]
    assert received.ids() == [-1]
    assert received.finish == {0: "length", 1: "length"}


def test_logprobs_of_a_prompt_that_was_preempted_halfway() -> None:
    driven = DrivenCore(blocks=6, step_tokens=3)
    old = driven.add("old", prompt_of(3, 1), greedy(12, min_tokens=12))
    driven.step()
    young = driven.add("young", prompt_of(18, 2), greedy(2), prompt_logprobs=1)
    driven.run()
    assert driven.core.stats.preemptions > 0
    check(driven, old, prompt_of(3, 1), greedy(12, min_tokens=12))
    [told] = young.prompt_logprobs
    assert list(told.entries) == logprobs_alone(driven, prompt_of(18, 2), 1)


def test_a_prefill_is_offered_while_it_runs() -> None:
    driven = DrivenCore(blocks=8, step_tokens=4)
    received, offer = driven.add_offer("p", prompt_of(14))
    seen = []
    for _ in range(4):
        driven.step()
        seen.append((len(offer.blocks), offer.logits is not None))
    assert seen == [(1, False), (2, False), (3, False), (4, True)]
    assert driven.model.holds(driven.pool, prompt_of(14), offer.blocks)
    assert received.reports[0].prompt_tokens == 14
    assert driven.core.memory.table.used == 4  # until somebody has read it
    driven.offers.claim(offer.offer_id, offer.key, hash_prompt(prompt_of(14))).stop_reading("read")
    driven.deliver()
    assert driven.core.memory.table.used == 0
    again, warm = driven.add_offer("q", prompt_of(14))
    driven.step()
    assert (len(warm.blocks), again.reports[0].cached_tokens) == (4, 12)


def test_an_offer_that_ended_before_the_engine_saw_it_takes_no_memory() -> None:
    driven = DrivenCore(blocks=8, step_tokens=4)
    received, offer = driven.add_offer("p", prompt_of(9))
    sequence = driven.core.waiting.pop()
    driven.offers.release(offer.offer_id)
    driven.deliver()
    driven.core.add(sequence)
    driven.run()
    assert isinstance(received.failures[0], HandoffBroken)
    assert driven.core.memory.table.used == 0


def test_a_pulled_prompt_is_not_computed() -> None:
    driven = DrivenCore(blocks=12, step_tokens=16)
    params = SamplingParams(seed=8, max_tokens=5)
    for expected_first in (0, 2):
        received, sequence, pull = driven.add_pulled("d", prompt_of(8), params, choices=3)
        driven.step()
        assert pull.target is not None
        assert pull.target[1] == expected_first
        steps = driven.core.stats.steps
        driven.land(sequence, pull)
        driven.deliver()
        assert driven.core.stats.steps == steps
        assert all(len(received.ids(choice)) == 1 for choice in range(3))
        driven.run()
        check(driven, received, prompt_of(8), params, choices=3)
        assert received.reports[0].cached_tokens == expected_first * 4


def test_prompts_of_a_lower_priority_number_are_prefilled_first() -> None:
    driven = DrivenCore(blocks=60, step_tokens=8)
    batch = driven.add("batch", prompt_of(40), greedy(), priority=10)
    driven.step()  # it has begun
    waiting = driven.add("waiting", prompt_of(40, seed=1), greedy(), priority=10)
    urgent = driven.add("urgent", prompt_of(12, seed=2), greedy())
    while not urgent.reports:
        assert driven.step()
    assert not batch.reports
    assert not waiting.reports
    driven.run()
    for received, seed, length in ((batch, 0, 40), (waiting, 1, 40), (urgent, 2, 12)):
        check(driven, received, prompt_of(length, seed), greedy())
