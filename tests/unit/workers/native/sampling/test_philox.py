"""Philox4x32-10 against the known answers that its authors publish (Random123, kat_vectors)."""

import numpy as np
import pytest
from numpy.typing import NDArray

from workers.native.sampling.philox import gumbel_noise, philox4x32

ONES = 0xFFFFFFFF
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ((ONES, ONES, ONES, ONES), (ONES, ONES), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def words(*values: int) -> tuple[NDArray[np.uint64], ...]:
    return tuple(np.array([value], dtype=np.uint64) for value in values)


@pytest.mark.parametrize("counter,key,answer", KNOWN_ANSWERS)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, int], answer: str) -> None:
    c0, c1, c2, c3 = words(*counter)
    [found] = philox4x32((c0, c1, c2, c3), key[0] | key[1] << 32)
    assert " ".join(f"{word:08x}" for word in found.tolist()) == answer


def test_many_counters_at_once_equal_one_at_a_time() -> None:
    draw = np.random.default_rng(5)
    columns = [draw.integers(0, 2**32, 50, dtype=np.uint64) for _ in range(4)]
    together = philox4x32((columns[0], columns[1], columns[2], columns[3]), 2**63 + 17)
    for row in range(50):
        one = [column[row : row + 1] for column in columns]
        assert (philox4x32((one[0], one[1], one[2], one[3]), 2**63 + 17)[0] == together[row]).all()


def test_noise_of_a_token_is_its_word_of_the_block_of_its_group() -> None:
    seed, sequence, position = 2**64 - 3, 2, 77
    ids = np.array([9, 4, 131071, 11], dtype=np.int64)
    noise = gumbel_noise(ids, seed, sequence, position)
    for token, found in zip(ids.tolist(), noise.tolist(), strict=True):
        c0, c1, c2, c3 = words(sequence, position, token // 4, 0)
        word = int(philox4x32((c0, c1, c2, c3), seed)[0, token % 4])
        assert found == pytest.approx(-np.log(-np.log((word + 0.5) / 2**32)), rel=1e-12)


def test_noise_does_not_depend_on_which_other_tokens_are_asked() -> None:
    everything = gumbel_noise(np.arange(500, dtype=np.int64), 1, 0, 3)
    some = np.array([499, 3, 250, 251], dtype=np.int64)
    assert (gumbel_noise(some, 1, 0, 3) == everything[some]).all()


@pytest.mark.parametrize("other", [(2, 0, 3, 0), (1, 1, 3, 0), (1, 0, 4, 0), (1, 0, 3, 1)])
def test_every_coordinate_changes_the_noise(other: tuple[int, int, int, int]) -> None:
    ids = np.arange(64, dtype=np.int64)
    seed, sequence, position, stream = other
    changed = gumbel_noise(ids, seed, sequence, position, stream)
    assert not (changed == gumbel_noise(ids, 1, 0, 3)).any()


def test_noise_is_gumbel_distributed() -> None:
    noise = gumbel_noise(np.arange(40_000, dtype=np.int64), 11, 0, 0)
    assert np.isfinite(noise).all()
    assert noise.mean() == pytest.approx(0.57722, abs=0.02)  # Euler-Mascheroni
    assert noise.var() == pytest.approx(np.pi**2 / 6, rel=0.03)
    ranks = np.sort(np.exp(-np.exp(-noise)))  # uniform, if it is Gumbel
    distance = np.abs(ranks - (np.arange(40_000) + 0.5) / 40_000).max()
    assert distance < 1.95 / np.sqrt(40_000)  # Kolmogorov-Smirnov at 0.1 %
