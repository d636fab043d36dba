"""`sample` on logits made by hand."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from workers.native.sampling.params import SamplingParams
from workers.native.sampling.sampler import rank_logprobs, sample

DRAWS = 400
# Upper 0.1 % points of chi-square by degrees of freedom.
CRITICAL = {1: 10.83, 2: 13.82, 3: 16.27, 4: 18.47, 7: 24.32}


def logits_of(*shares: float) -> Tensor:
    return torch.tensor(shares, dtype=torch.float32).log()


def counts(logits: Tensor, **wishes: Any) -> Counter[int]:
    return Counter(
        sample(logits, SamplingParams(seed=seed, **wishes), [0], []).token_id
        for seed in range(DRAWS)
    )


def assert_shares(found: Counter[int], shares: dict[int, float]) -> None:
    assert found.keys() == shares.keys()
    whole = sum(shares.values())
    statistic = 0.0
    for token, share in shares.items():
        expected = DRAWS * share / whole
        statistic += (found[token] - expected) ** 2 / expected
    assert statistic < CRITICAL[len(shares) - 1]


FOUR = (0.5, 0.3, 0.15, 0.05)
SHARES = dict(enumerate(FOUR))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_temperature_sharpens_or_flattens(temperature: float) -> None:
    found = counts(logits_of(*FOUR), temperature=temperature)
    assert_shares(found, {token: p ** (1 / temperature) for token, p in SHARES.items()})


def test_eight_tokens_at_temperature_one() -> None:
    shares = [0.02, 0.3, 0.08, 0.2, 0.1, 0.05, 0.15, 0.1]
    assert_shares(counts(logits_of(*shares)), dict(enumerate(shares)))


@pytest.mark.parametrize(
    "wishes,kept",
    [
        ({"top_k": 2}, [0, 1]),
        ({"top_k": 3}, [0, 1, 2]),
        ({"top_k": 99}, [0, 1, 2, 3]),
        ({"top_p": 0.51}, [0, 1]),
        ({"top_p": 0.79}, [0, 1]),
        ({"top_p": 0.81}, [0, 1, 2]),
        ({"top_p": 0.96}, [0, 1, 2, 3]),
        ({"min_p": 0.59}, [0, 1]),  # at least 0.59 of the likeliest: 0.295
        ({"min_p": 0.31}, [0, 1]),
        ({"min_p": 0.29}, [0, 1, 2]),
        ({"min_p": 0.05}, [0, 1, 2, 3]),
        ({"top_k": 3, "top_p": 0.6}, [0, 1]),  # shares of the three: 0.526, 0.316, 0.158
        ({"top_k": 3, "min_p": 0.31}, [0, 1]),
        ({"top_p": 0.81, "min_p": 0.59}, [0, 1]),
    ],
    ids=str,
)
def test_who_survives_and_how_often(wishes: dict[str, Any], kept: list[int]) -> None:
    assert_shares(counts(logits_of(*FOUR), **wishes), {token: SHARES[token] for token in kept})


@pytest.mark.parametrize("wishes", [{"top_k": 1}, {"top_p": 0.49}, {"top_p": 1e-9}, {"min_p": 1.0}])
def test_the_likeliest_always_survives(wishes: dict[str, Any]) -> None:
    assert counts(logits_of(0.1, 0.5, 0.4), **wishes).keys() == {1}


def test_min_p_looks_at_scaled_shares() -> None:
    # At temperature 2 the shares are as 1 : 0.775, so 0.3 of 0.5 no longer falls below 0.7.
    assert_shares(
        counts(logits_of(0.5, 0.3, 0.2), temperature=2.0, min_p=0.7),
        {0: 0.5**0.5, 1: 0.3**0.5},
    )


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-5])
def test_greedy_takes_the_first_of_equals(temperature: float) -> None:
    logits = torch.tensor([1.0, 3.0, 3.0, 3.0])
    for seed in range(5):
        params = SamplingParams(temperature=temperature, seed=seed)
        assert sample(logits, params, [1], []).token_id == 1


def test_extreme_logits_and_low_temperature() -> None:
    logits = torch.tensor([3e38, -3e38, float("-inf"), 2.9e38])
    for temperature in (0.0, 2e-5, 1.0):
        assert sample(logits, SamplingParams(temperature=temperature), [1], []).token_id == 0


def chosen(logits: list[float], prompt: list[int], output: list[int], **wishes: Any) -> int:
    params = SamplingParams(temperature=0.0, **wishes)
    return sample(torch.tensor(logits), params, prompt, output).token_id


@pytest.mark.parametrize(
    "wishes,prompt,output,rival,wins",
    [
        # Token 0 has logit 2.0; `rival` is that of token 1, just below or above what is left of it.
        ({"presence_penalty": 0.5}, [1], [0, 0, 0], 1.49, 0),
        ({"presence_penalty": 0.5}, [1], [0, 0, 0], 1.51, 1),
        ({"presence_penalty": 0.5}, [0, 0], [2], 1.99, 0),  # a prompt is not punished
        ({"frequency_penalty": 0.5}, [1], [0, 2, 0, 0], 0.49, 0),
        ({"frequency_penalty": 0.5}, [1], [0, 2, 0, 0], 0.51, 1),
        ({"frequency_penalty": 0.5}, [0], [2], 1.99, 0),
        ({"presence_penalty": 0.25, "frequency_penalty": 0.5}, [1], [0, 0], 0.74, 0),
        ({"presence_penalty": 0.25, "frequency_penalty": 0.5}, [1], [0, 0], 0.76, 1),
        ({"presence_penalty": -1.0}, [1], [0], 2.99, 0),
        ({"repetition_penalty": 1.6}, [0], [], 1.24, 0),  # divides what is positive, once
        ({"repetition_penalty": 1.6}, [0], [0, 0], 1.26, 1),
        ({"repetition_penalty": 1.6}, [2], [0], 1.26, 1),
        ({"repetition_penalty": 0.5}, [2], [0], 3.99, 0),
        ({"logit_bias": {0: -3.0}}, [2], [], -0.99, 1),
        ({"logit_bias": {0: -3.0}}, [2], [], -1.01, 0),
        ({"logit_bias": {1: 3.0}}, [2], [], -0.99, 1),
        # HF's rule first, then OpenAI's, then the bias: 2 / 2 - 0.5 - 0.25 + 1 = 1.25
        (
            {
                "repetition_penalty": 2.0,
                "presence_penalty": 0.5,
                "frequency_penalty": 0.25,
                "logit_bias": {0: 1.0},
            },
            [2],
            [0],
            1.24,
            0,
        ),
        (
            {
                "repetition_penalty": 2.0,
                "presence_penalty": 0.5,
                "frequency_penalty": 0.25,
                "logit_bias": {0: 1.0},
            },
            [2],
            [0],
            1.26,
            1,
        ),
    ],
    ids=str,
)
def test_penalties(
    wishes: dict[str, Any], prompt: list[int], output: list[int], rival: float, wins: int
) -> None:
    assert chosen([2.0, rival, -9.0], prompt, output, **wishes) == wins


def test_repetition_penalty_multiplies_what_is_negative() -> None:
    assert chosen([-1.0, -1.99, -9.0], [0], [], repetition_penalty=2.0) == 1
    assert chosen([-1.0, -2.01, -9.0], [0], [], repetition_penalty=2.0) == 0


def test_bias_bans_and_forces() -> None:
    logits = logits_of(0.97, 0.01, 0.01, 0.01)
    assert counts(logits, logit_bias={0: -100.0}).keys() == {1, 2, 3}
    assert counts(logits, logit_bias={3: 100.0}).keys() == {3}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_banned_tokens_are_never_chosen(temperature: float) -> None:
    logits = logits_of(0.6, 0.38, 0.02)
    for seed in range(200):
        params = SamplingParams(temperature=temperature, seed=seed)
        assert sample(logits, params, [0], [], banned=(0, 1)).token_id == 2
    assert logits.exp().tolist() == pytest.approx([0.6, 0.38, 0.02])  # and nobody's row was changed


def test_logprobs_are_the_model_s_before_any_setting() -> None:
    logits = logits_of(*FOUR)
    params = SamplingParams(
        temperature=0.3, top_k=1, logit_bias={3: 100.0}, presence_penalty=2.0, logprobs=4
    )
    result = sample(logits, params, [0], [1, 2])
    assert result.token_id == 3
    assert result.logprob is not None
    assert result.logprob.token_id == 3
    assert math.exp(result.logprob.logprob) == pytest.approx(0.05)
    assert [entry.token_id for entry in result.top] == [0, 1, 2, 3]
    assert [math.exp(entry.logprob) for entry in result.top] == pytest.approx(FOUR)
    assert sum(math.exp(entry.logprob) for entry in result.top) == pytest.approx(1.0)


def test_logprobs_as_many_as_asked() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(1))
    assert sample(logits, SamplingParams(), [0], []).logprob is None
    assert sample(logits, SamplingParams(logprobs=0), [0], []).top == ()
    chosen_one, top = rank_logprobs(logits, 7, 99)
    assert chosen_one.token_id == 7
    assert len(top) == 50
    assert sorted(top, key=lambda entry: -entry.logprob) == list(top)


def test_a_draw_depends_on_seed_choice_and_position_and_on_nothing_else() -> None:
    logits = torch.zeros(1000)

    def draw(seed: int = 5, choice: int = 0, prompt: int = 10, output: int = 3) -> int:
        return sample(
            logits, SamplingParams(seed=seed), [1] * prompt, [2] * output, sequence=choice
        ).token_id

    first = draw()
    others = {draw(seed=6), draw(choice=1), draw(prompt=11), draw(output=4)}
    assert first not in others
    assert len(others) > 2
    assert draw() == first
    assert draw(prompt=3, output=10) == first  # the position counts, not where the prompt ends
    scaled = sample(logits[:500], SamplingParams(seed=5), [1] * 13, []).token_id
    assert scaled == first or first >= 500
