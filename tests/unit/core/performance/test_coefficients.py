"""The latency model's formulas against figures worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from splitserve.performance.coefficients import KNOWN, Coefficients, area, from_rates

# a 10 ms, b 0.5 ms, c 1 us, a_p 4 ms, p 0.1 ms, q 2 ns, budget 100 tokens a step
ROUND = Coefficients(10e-3, 0.5e-3, 1e-6, 4e-3, 0.1e-3, 2e-9, 100)
RTX4090 = KNOWN["rtx4090-llama-3.1-8b"]


def test_area_of_a_prompt_counts_what_it_attends_to() -> None:
    assert area(0, 500) == 0
    assert area(10, 0) == 50
    assert area(10, 100) == 1050


def test_area_is_the_same_in_one_piece_or_many() -> None:
    assert area(300, 40) == area(100, 40) + area(150, 140) + area(50, 290)


def test_decode_step() -> None:
    assert ROUND.decode_step_s(0, 0) == pytest.approx(10e-3)
    assert ROUND.decode_step_s(8, 3000) == pytest.approx(10e-3 + 4e-3 + 3e-3)


@pytest.mark.parametrize(
    "prompt_tokens,streams,steps",
    [(1, 0, 1), (100, 0, 1), (101, 0, 2), (90, 10, 1), (91, 10, 2), (100, 50, 2), (100, 400, 2)],
)
def test_steps_of_a_prompt_in_what_decodes_leave(
    prompt_tokens: int, streams: int, steps: int
) -> None:
    assert ROUND.prefill_steps(prompt_tokens, streams) == steps


def test_nothing_to_prefill_takes_no_time() -> None:
    assert ROUND.prefill_s(0, 0, 8, 3000) == 0.0


def test_a_short_prompt_takes_a_step_at_least() -> None:
    assert ROUND.alone_s(10, 0) == pytest.approx(10e-3)  # 4 + 1 ms of work, but a step is 10


def test_a_long_prompt_takes_what_its_work_takes() -> None:
    # two steps: 2 * (8 * 0.5 + 3) ms beside decodes, and 2 * 4 + 180 * 0.1 + 2e-6 * 34200 ms
    took_s = ROUND.prefill_s(180, area(180, 100), 8, 3000)
    assert took_s == pytest.approx(14e-3 + 8e-3 + 18e-3 + 2e-9 * 34_200)


@pytest.mark.parametrize(
    "budget_tokens,prompt_tokens,idle_ms,beside_ms",
    [(512, 512, 53, 85), (2048, 2048, 188, 220), (512, 4054, 453, 559)],
)
def test_blocking_by_a_piece_of_batch_on_a_known_card(
    budget_tokens: int, prompt_tokens: int, idle_ms: float, beside_ms: float
) -> None:
    """Idle, and beside 32 streams of 2,048 tokens: the figures behind the promise."""
    card = replace(RTX4090, budget_tokens=budget_tokens)
    whole = area(prompt_tokens, 0)
    idle_s = card.prefill_s(prompt_tokens, whole, 0, 0)
    beside_s = card.prefill_s(prompt_tokens, whole, 32, 32 * 2048)
    assert idle_s * 1e3 == pytest.approx(idle_ms, abs=1.0)
    assert beside_s * 1e3 == pytest.approx(beside_ms, abs=1.0)


def test_an_engine_step() -> None:
    assert ROUND.step_of(0, 0, 8, 3000) == pytest.approx(ROUND.decode_step_s(8, 3000))
    assert ROUND.step_of(10, 0, 8, 3000) == pytest.approx(ROUND.decode_step_s(8, 3000))
    assert ROUND.step_of(90, 1000, 8, 3000) == pytest.approx(7e-3 + 4e-3 + 9e-3 + 2e-6)


def test_a_guess_from_two_rates() -> None:
    guess = from_rates(1000.0, 50.0, 512)
    assert guess.budget_tokens == 512
    assert guess.decode_step_s(0, 0) == pytest.approx(0.02)
    assert guess.alone_s(400, 0) == pytest.approx(0.75 * 0.02 + 0.4 + 5e-8 * 80_000)
    unknown = from_rates(0.0, 0.0)
    assert unknown.step_s > 0
    assert unknown.per_prompt_token_s > 0
