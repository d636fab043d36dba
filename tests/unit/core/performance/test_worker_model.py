"""One worker's model: margin, drift, stalls, and that it comes to predict what it sees."""

from __future__ import annotations

import random
from statistics import mean

import pytest

from splitserve.performance.coefficients import KNOWN, Coefficients, area
from splitserve.performance.worker_model import Ratio, WorkerModel

TRUE = KNOWN["rtx4090-llama-3.1-8b"]
WRONG = Coefficients(34e-3, 0.08e-3, 2.86e-7, 21.4e-3, 0.165e-3, 8e-9)  # twice as slow


def prompts(model: WorkerModel, ratios: list[float], tokens: int = 1000) -> None:
    """Let the worker take `ratio` times what its coefficients say, prompt after prompt."""
    for ratio in ratios:
        predicted_s = model.coefficients.prefill_s(tokens, area(tokens, 0), 0, 0)
        model.saw_prefill(tokens, area(tokens, 0), 0, 0, ratio * predicted_s)


def test_the_margin_starts_at_fifteen_percent() -> None:
    model = WorkerModel(TRUE)
    assert model.margin == 1.15
    prompts(model, [1.0] * 19)
    assert model.margin == 1.15
    assert WorkerModel(TRUE, fixed=True).margin == 1.0


@pytest.mark.parametrize("ratio,margin", [(0.6, 1.05), (1.0, 1.05), (1.3, 1.3), (4.0, 1.5)])
def test_the_margin_is_what_nine_of_ten_keep_within_bounds(ratio: float, margin: float) -> None:
    model = WorkerModel(TRUE)
    model._ratios.extend([1.0] * 17)  # by the back door, so that the fit does not follow
    prompts(model, [ratio] * 3)
    assert model.margin == pytest.approx(margin)


def test_the_margin_looks_back_two_hundred_prompts() -> None:
    model = WorkerModel(TRUE)
    draw = random.Random(2)
    prompts(model, [draw.choice((0.8, 1.2)) for _ in range(200)])
    assert 1.1 < model.margin <= 1.5
    prompts(model, [1.0] * 220)
    assert model.margin == 1.05


def test_drift_follows_a_fifth_in_twenty_and_is_clipped() -> None:
    ratio = Ratio()
    for actual, expected in ((1.5, 1.025), (1.5, 1.04875), (100.0, 1.0963125)):
        ratio.see(actual, 1.0)
        assert ratio.value == pytest.approx(expected)
    for _ in range(200):
        ratio.see(100.0, 1.0)
    assert ratio.value == pytest.approx(2.0, abs=1e-3)
    for _ in range(200):
        ratio.see(0.001, 1.0)
    assert ratio.value == pytest.approx(0.5, abs=1e-3)
    ratio.see(5.0, 0.0)
    assert ratio.samples == 403


def test_the_mean_error_is_of_the_corrected_prediction() -> None:
    ratio = Ratio()
    ratio.see(2.0, 1.0)
    assert ratio.error == pytest.approx(0.5)
    ratio.see(2.0, 1.0)  # predicted 1.05
    assert ratio.error == pytest.approx((0.5 + 0.475) / 2)


def test_drift_multiplies_predictions_of_its_phase_only() -> None:
    model = WorkerModel(TRUE, fixed=True)
    for _ in range(300):
        model.saw_decode(8, 8000, 1.5 * TRUE.decode_step_s(8, 8000))
    assert model.decode_step_s(8, 8000) == pytest.approx(
        1.5 * TRUE.decode_step_s(8, 8000), rel=1e-3
    )
    assert model.prefill_s(500, 125_000, 0, 0) == TRUE.prefill_s(500, 125_000, 0, 0)
    assert model.coefficients == TRUE
    assert not model.learnt


def test_a_stall_is_counted_and_teaches_nothing() -> None:
    model = WorkerModel(TRUE)
    for _ in range(10):
        model.saw_decode(4, 4000, TRUE.decode_step_s(4, 4000))
    before = model.coefficients
    for _ in range(10):
        model.saw_decode(4, 4000, 1.0)
    assert model.stalls == 10
    assert model.coefficients == before
    assert model.decode_drift.value == pytest.approx(1.0)


def test_a_wrong_prior_is_unlearnt_in_both_phases() -> None:
    model, draw = WorkerModel(WRONG), random.Random(4)
    for _ in range(600):
        n, k = draw.randint(1, 40), draw.uniform(2e3, 4e4)
        model.saw_decode(n, int(k), TRUE.decode_step_s(n, k) * draw.gauss(1, 0.05))
        tokens, cached = draw.randint(600, 6000), draw.randint(0, 2000)
        size = area(tokens, cached)
        took_s = TRUE.prefill_s(tokens, size, n, k) * draw.gauss(1, 0.05)
        model.saw_prefill(tokens, size, n, k, took_s)
    assert model.learnt
    decode = [(n, k) for n in (4, 16, 40) for k in (5e3, 3e4)]
    wrong = [abs(model.decode_step_s(*x) / TRUE.decode_step_s(*x) - 1) for x in decode]
    assert mean(wrong) < 0.03
    fill = [(u, area(u, c), n, 1e4) for u in (700, 3000) for c in (0, 1500) for n in (0, 20)]
    wrong = [abs(model.prefill_s(*x) / TRUE.prefill_s(*x) - 1) for x in fill]
    assert mean(wrong) < 0.05
    assert model.decode_drift.error < 0.15
    assert 1.05 <= model.margin <= 1.15


def test_nonsense_is_not_learnt() -> None:
    model = WorkerModel(TRUE)
    model.saw_prefill(0, 0, 0, 0, 1.0)
    model.saw_prefill(100, 5000, 0, 0, 0.0)
    assert not model.learnt
    assert model.prefill_drift.samples == 0
