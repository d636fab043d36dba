"""The non-negative fit: exact where it can be checked, close where there is noise."""

from __future__ import annotations

import math
import random
from itertools import product
from statistics import mean

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from splitserve.performance.coefficients import KNOWN
from splitserve.performance.regression import NonNegativeFit, Vector, solve

AFAR = tuple(product((1, 8, 32, 64), (1_000, 10_000, 40_000, 80_000)))
SEEDS = range(5)

values = st.floats(0, 10)
rows = st.lists(st.tuples(values, values, values, st.floats(-10, 10)), min_size=3, max_size=12)


def normal_equations(
    samples: list[tuple[float, float, float, float]],
) -> tuple[list[list[float]], list[float]]:
    a = [[sum(s[i] * s[j] for s in samples) for j in range(3)] for i in range(3)]
    return a, [sum(s[i] * s[3] for s in samples) for i in range(3)]


def cost(a: list[list[float]], v: list[float], theta: Vector) -> float:
    quadratic = sum(theta[i] * a[i][j] * theta[j] for i in range(3) for j in range(3))
    return quadratic - 2 * sum(v[i] * theta[i] for i in range(3))


def descend(a: list[list[float]], v: list[float]) -> Vector:
    """Brute force: thousands of rounds of coordinate descent from zero, clipped at zero."""
    theta = [0.0, 0.0, 0.0]
    for _ in range(4000):
        before = list(theta)
        for i in range(3):
            rest = sum(a[i][j] * theta[j] for j in range(3) if j != i)
            theta[i] = max(0.0, (v[i] - rest) / a[i][i])
        if max(abs(x - y) for x, y in zip(theta, before, strict=True)) < 1e-13:
            break
    return theta[0], theta[1], theta[2]


@given(samples=rows)
def test_solve_is_as_good_as_brute_force(samples: list[tuple[float, float, float, float]]) -> None:
    a, v = normal_equations(samples)
    assume(min(a[i][i] for i in range(3)) > 1e-3)
    found = solve(a, v) or (0.0, 0.0, 0.0)
    assert min(found) >= 0
    slack = 1e-6 * (1 + sum(s[3] ** 2 for s in samples))
    assert cost(a, v, found) <= cost(a, v, descend(a, v)) + slack


@given(theta=st.tuples(values, values, values), samples=rows)
def test_solve_recovers_what_made_the_samples(
    theta: Vector, samples: list[tuple[float, float, float, float]]
) -> None:
    exact = [(x, y, z, theta[0] * x + theta[1] * y + theta[2] * z) for x, y, z, _ in samples]
    a, v = normal_equations(exact)
    assume(min(a[i][i] for i in range(3)) > 1e-3)
    found = solve(a, v) or (0.0, 0.0, 0.0)
    for x, y, z, target in exact:
        predicted = found[0] * x + found[1] * y + found[2] * z
        assert predicted == pytest.approx(target, abs=1e-3)


def test_solve_with_nothing_to_go_by() -> None:
    assert solve([[0.0] * 3 for _ in range(3)], [0.0] * 3) is None
    assert solve([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]], [-1.0, -1.0, -1.0]) is None


def learn(profile: str, seed: int, factor: float, samples: int) -> tuple[float, float, Vector]:
    """Feed decode steps with 10 % noise whose streams and lengths drift slowly, as waves.

    Returns the mean relative error far from where the samples were, the error where the last one
    was, and the coefficients.
    """
    true, draw = KNOWN[profile], random.Random(seed)
    prior = (true.step_s, true.per_sequence_s, true.per_kv_token_s)
    fit = NonNegativeFit((prior[0] * factor, prior[1] * factor, prior[2] * factor))
    streams, kv_tokens = 0, 0.0
    for number in range(1, samples + 1):
        streams = round(20 + 14 * math.sin(seed + number / 100))
        kv_tokens = streams * (1000 + 600 * math.sin(2 * seed + number / 170))
        noise = max(0.5, draw.gauss(1.0, 0.1))
        fit.see((1.0, streams, kv_tokens), true.decode_step_s(streams, kv_tokens) * noise)
        assert min(fit.theta) >= 0

    def error(n: float, k: float) -> float:
        return abs(fit.predict((1.0, n, k)) / true.decode_step_s(n, k) - 1)

    return mean(error(n, k) for n, k in AFAR), error(streams, kv_tokens), fit.theta


@pytest.mark.parametrize("factor", [0.5, 2.0])
@pytest.mark.parametrize(
    "samples,afar,worst",
    [(10, 0.13, 0.18), (200, 0.07, 0.08), (3000, 0.03, 0.05)],
)
def test_a_prior_wrong_by_two_is_forgotten(
    factor: float, samples: int, afar: float, worst: float
) -> None:
    errors = [learn(profile, seed, factor, samples)[0] for profile in KNOWN for seed in SEEDS]
    assert mean(errors) <= afar
    assert max(errors) <= worst


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_after_fifty_samples_it_is_right_where_the_worker_is(factor: float) -> None:
    errors = [learn(profile, seed, factor, 50)[1] for profile in KNOWN for seed in SEEDS]
    assert mean(errors) <= 0.04


def test_coefficients_hold_between_two_solutions() -> None:
    fit = NonNegativeFit((1.0, 1.0, 1.0))
    for number in range(1, 31):
        before = fit.theta
        fit.see((1.0, float(number % 7), float(number % 3)), 5.0)
        assert (fit.theta == before) == (number % 10 != 0)


def test_a_worker_that_changes_is_followed() -> None:
    fit, draw = NonNegativeFit((0.02, 1e-5, 1e-7)), random.Random(1)
    for slowdown in (1.0, 3.0):
        for _ in range(2500):
            n, k = draw.randint(1, 60), draw.uniform(1e3, 6e4)
            fit.see((1.0, n, k), slowdown * (0.02 + 4e-5 * n + 1.5e-7 * k) * draw.gauss(1, 0.05))
        wanted_s = slowdown * (0.02 + 4e-5 * 30 + 1.5e-7 * 3e4)
        assert fit.predict((1.0, 30.0, 3e4)) == pytest.approx(wanted_s, rel=0.05)


@given(
    st.lists(
        st.tuples(st.integers(0, 300), st.integers(0, 500_000), st.floats(0, 10)),
        min_size=10,
        max_size=60,
    )
)
def test_coefficients_are_never_negative(samples: list[tuple[int, int, float]]) -> None:
    fit = NonNegativeFit((0.017, 4e-5, 1.4e-7))
    for streams, kv_tokens, took_s in samples:
        fit.see((1.0, streams, kv_tokens), took_s)
        assert min(fit.theta) >= 0
