"""The router's picture of prefix caches: what is matched, what is pushed out."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from splitserve.prefix.index import PrefixIndex


def held(index: PrefixIndex, worker_id: str, blocks: Sequence[int]) -> set[int]:
    return {block for block in blocks if index.match(worker_id, (block,))}


def test_only_leading_blocks_match() -> None:
    index = PrefixIndex()
    index.add("w", (1, 2, 3))
    assert index.match("w", (1, 2, 3, 4)) == 3
    assert index.match("w", (1, 9, 3)) == 1
    assert index.match("w", (2, 3)) == 2
    assert index.match("w", (9, 1, 2)) == 0
    assert index.match("v", (1,)) == 0
    assert index.match("w", ()) == 0


def test_the_deepest_blocks_of_the_oldest_prompt_go_first() -> None:
    index = PrefixIndex()
    index.bound("w", 5)
    index.add("w", (1, 2, 3))
    index.add("w", (11, 12, 13))
    assert index.match("w", (1, 2, 3)) == 2
    assert index.match("w", (11, 12, 13)) == 3


def test_a_prompt_used_again_is_kept() -> None:
    index = PrefixIndex()
    index.bound("w", 4)
    index.add("w", (1, 2))
    index.add("w", (11, 12))
    index.add("w", (1, 2))
    index.add("w", (21, 22))
    assert held(index, "w", (1, 2, 11, 12, 21, 22)) == {1, 2, 21, 22}


def test_a_prompt_longer_than_the_cache_keeps_its_beginning() -> None:
    index = PrefixIndex(limit_blocks=3)
    index.add("w", range(10))
    assert index.match("w", range(10)) == 3


def test_a_worker_that_restarted_has_nothing_but_its_bound() -> None:
    index = PrefixIndex()
    index.bound("w", 2)
    index.add("w", (1, 2))
    index.forget("w")
    assert index.match("w", (1, 2)) == 0
    index.add("w", (1, 2, 3))
    assert index.match("w", (1, 2, 3)) == 2


def test_a_bound_is_at_least_one_and_at_most_the_index_limit() -> None:
    index = PrefixIndex(limit_blocks=4)
    index.bound("w", 0)
    index.bound("v", 100)
    for worker_id, expected in (("w", 1), ("v", 4)):
        index.add(worker_id, range(10))
        assert index.match(worker_id, range(10)) == expected


@given(
    limit=st.integers(1, 12),
    prompts=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 8)), max_size=30),
)
def test_it_is_an_lru_of_blocks(limit: int, prompts: list[tuple[int, int]]) -> None:
    """Against a plain list: each prompt's blocks move to the end, deepest first."""
    index, plain = PrefixIndex(), list[int]()
    index.bound("w", limit)
    for family, length in prompts:
        blocks = [100 * family + depth for depth in range(length)]
        index.add("w", blocks)
        plain = [*(b for b in plain if b not in blocks), *reversed(blocks)][-limit:]
        everything = [100 * f + depth for f in range(4) for depth in range(8)]
        assert held(index, "w", everything) == set(plain)


def test_blocks_that_a_worker_let_go_are_the_oldest() -> None:
    index = PrefixIndex()
    index.add("w", (1, 2, 3))
    index.add("w", (11, 12))
    index.remove_oldest("w", 2)
    assert index.match("w", (1, 2, 3)) == 1
    assert index.match("w", (11, 12)) == 2
    index.remove_oldest("w", 99)
    assert index.match("w", (11, 12)) == 0
    index.remove_oldest("never seen", 1)
