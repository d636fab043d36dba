"""`BlockTable` against a model of it: who holds what, what is found, what is evicted first."""

from collections import Counter, OrderedDict

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from workers.native.kv.blocks import BlockTable, OutOfBlocksError, chain_hashes

BLOCKS = 7
BLOCK_TOKENS = 2
SALT = b"model"
prompts = st.lists(st.integers(0, 2), min_size=BLOCK_TOKENS, max_size=8)


class BlockTableMachine(RuleBasedStateMachine):
    """Holders come with a prompt, take what is cached and new blocks for the rest, and leave."""

    def __init__(self) -> None:
        super().__init__()
        self.table = BlockTable(BLOCKS)
        self.holders: list[list[int]] = []
        self.content: dict[int, tuple[int, ...]] = {}  # block -> all tokens up to its end
        self.idle: OrderedDict[int, None] = OrderedDict()  # cached and unheld, oldest first

    def held(self) -> Counter[int]:
        return Counter(block for blocks in self.holders for block in blocks)

    def cached_prefix(self, prompt: list[int]) -> list[int]:
        known = {tokens: block for block, tokens in self.content.items()}
        found: list[int] = []
        for end in range(BLOCK_TOKENS, len(prompt) + 1, BLOCK_TOKENS):
            block = known.get(tuple(prompt[:end]))
            if block is None:
                break
            found.append(block)
        return found

    @rule(prompt=prompts)
    def arrive(self, prompt: list[int]) -> None:
        hashes = chain_hashes(prompt, BLOCK_TOKENS, SALT)
        expected = self.cached_prefix(prompt)
        found = self.table.match(hashes)
        assert found == expected
        for block in found:
            self.idle.pop(block, None)
        need = -(-len(prompt) // BLOCK_TOKENS) - len(found)
        self.holders.append(found)
        before = self.table.free
        if need > before:
            with pytest.raises(OutOfBlocksError, match="wanted"):
                self.table.take(need)
            assert self.table.free == before
            return
        fresh = self.take(need)
        self.holders[-1] = found + fresh
        for number in range(len(found), len(hashes)):
            block = (found + fresh)[number]
            tokens = tuple(prompt[: (number + 1) * BLOCK_TOKENS])
            self.table.publish(block, hashes[number])
            if tokens not in self.content.values():
                self.content[block] = tokens

    def take(self, count: int) -> list[int]:
        held, idle = self.held(), list(self.idle)
        evictions = max(0, count - (BLOCKS - len(held) - len(idle)))
        before = self.table.evictions
        fresh = self.table.take(count)
        assert len(set(fresh)) == count
        assert not held.keys() & set(fresh), "a block in use was handed out again"
        assert self.table.evictions - before == evictions
        assert set(idle) & set(fresh) == set(idle[:evictions]), "not the oldest were evicted"
        for block in idle[:evictions]:
            del self.idle[block], self.content[block]
        return fresh

    @rule(data=st.data())
    @precondition(lambda self: self.holders)
    def share(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from(self.holders))
        for block in blocks:
            self.table.hold(block)
        self.holders.append(list(blocks))

    @rule(data=st.data())
    @precondition(lambda self: self.holders)
    def leave(self, data: st.DataObject) -> None:
        blocks = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.table.drop(blocks)
        still = self.held()
        for block in reversed(blocks):
            if not still[block] and block in self.content:
                self.idle[block] = None

    @invariant()
    def counts_agree(self) -> None:
        assert self.table.used == len(self.held())
        assert self.table.free == BLOCKS - len(self.held())
        assert self.table.cached == len(self.content)


BlockTableMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
TestBlockTable = BlockTableMachine.TestCase


def test_dropping_twice_is_a_programming_error() -> None:
    table = BlockTable(2)
    blocks = table.take(1)
    table.drop(blocks)
    with pytest.raises(AssertionError, match="dropped twice"):
        table.drop(blocks)


def test_the_first_block_with_a_hash_keeps_it() -> None:
    table = BlockTable(3)
    first, second = table.take(2)
    table.publish(first, b"h")
    table.publish(second, b"h")
    table.publish(first, b"other")
    assert table.match([b"h"]) == [first]
    assert table.match([b"other"]) == []
    table.drop([second])
    assert table.cached == 1


def test_hashes_cover_the_whole_prefix_and_the_salt() -> None:
    one = chain_hashes([1, 2, 3, 4, 5], 2, b"a")
    assert len(one) == 2
    assert (
        len({*one, *chain_hashes([9, 2, 3, 4], 2, b"a"), *chain_hashes([1, 2, 3, 4], 2, b"b")}) == 6
    )
    assert chain_hashes([1, 2, 3, 4, 6], 2, b"a") == one
    assert chain_hashes([1, 2, 3, 5], 2, b"a")[0] == one[0]
    assert chain_hashes([1], 2, b"a") == []


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    table = BlockTable(3)
    hashes = chain_hashes(range(6), 2, SALT)
    blocks = table.take(3)
    for block, key in zip(blocks, hashes, strict=True):
        table.publish(block, key)
    table.drop(blocks)
    assert table.take(1) == [blocks[2]]
    assert table.match(hashes) == blocks[:2]
