"""A pool of 8 blocks, one of them the null block."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ringcore.kv_cache.block_pool import Block, BlockPool


def ids(blocks: list[Block]) -> list[int]:
    return [block.id for block in blocks]


def cache(pool: BlockPool, blocks: list[Block], name: str = "") -> None:
    for block in blocks:
        pool.cache_block(block, f"{name}{block.id}".encode(), b"tokens")


def test_the_null_block_is_never_handed_out():
    pool = BlockPool(8)
    assert (pool.num_usable_blocks, pool.num_free_blocks) == (7, 7)
    assert ids(pool.allocate(7)) == [1, 2, 3, 4, 5, 6, 7]
    assert pool.num_free_blocks == 0
    with pytest.raises(AssertionError, match="not so many"):
        pool.allocate(1)


def test_uncached_blocks_are_reused_while_warm_and_in_order():
    pool = BlockPool(8)
    first, second = pool.allocate(2), pool.allocate(3)
    pool.free(first)
    pool.free(second)
    assert ids(pool.allocate(6)) == [3, 4, 5, 1, 2, 6]


def test_blocks_without_a_hash_go_before_cached_ones():
    pool = BlockPool(8)
    blocks = pool.allocate(3)
    cache(pool, blocks[:2])
    pool.free(blocks)
    assert ids(pool.allocate(5)) == [3, 4, 5, 6, 7]
    assert pool.num_cached_blocks == 2


def test_a_prefix_outlives_its_tail_and_the_least_recent_goes_first():
    pool = BlockPool(8)
    old, new = pool.allocate(3), pool.allocate(4)
    cache(pool, [*old, *new])
    pool.free(old)
    pool.free(new)
    assert ids(pool.allocate(7)) == [3, 2, 1, 7, 6, 5, 4]
    assert pool.num_cached_blocks == 0


def test_a_cached_block_is_evicted_only_when_it_is_handed_out():
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    cache(pool, blocks)
    pool.free(blocks)
    assert ids(pool.allocate(1)) == [2]
    assert pool.lookup(b"1", b"tokens") is blocks[0]
    assert pool.lookup(b"2", b"tokens") is None


def test_touch_takes_a_free_block_out_of_the_middle():
    pool = BlockPool(8)
    blocks = pool.allocate(7)
    cache(pool, blocks)
    pool.free(blocks)
    pool.touch([blocks[3]])
    pool.touch([blocks[3]])
    assert (pool.num_free_blocks, blocks[3].ref_count) == (6, 2)
    pool.free([blocks[3]])
    assert pool.num_free_blocks == 6
    assert ids(pool.allocate(6)) == [7, 6, 5, 3, 2, 1]
    assert pool.lookup(b"4", b"tokens") is blocks[3]


def test_a_touched_block_becomes_the_most_recent():
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    cache(pool, blocks)
    pool.free(blocks)
    pool.touch([blocks[2]])
    pool.free([blocks[2]])
    assert ids(pool.allocate(3)) == [2, 1, 3]


def test_a_hit_is_confirmed_by_its_tokens():
    pool = BlockPool(8)
    (block,) = pool.allocate(1)
    pool.cache_block(block, b"hash", b"tokens")
    assert pool.lookup(b"hash", b"tokens") is block
    assert pool.lookup(b"hash", b"others") is None
    assert pool.lookup(b"another", b"tokens") is None


def test_of_twins_the_first_stays_the_one_found():
    pool = BlockPool(8)
    one, twin = pool.allocate(2)
    pool.cache_block(one, b"hash", b"tokens")
    pool.cache_block(twin, b"hash", b"tokens")
    assert pool.lookup(b"hash", b"tokens") is one
    pool.free([one, twin])
    assert ids(pool.allocate(1)) == [twin.id]
    pool.check({twin.id: 1})


def test_reset_only_while_nothing_is_in_use():
    pool = BlockPool(8)
    blocks = pool.allocate(2)
    cache(pool, blocks)
    assert pool.reset_prefix_cache() is False
    assert pool.lookup(b"1", b"tokens") is blocks[0]
    pool.free(blocks)
    assert pool.reset_prefix_cache() is True
    assert (pool.num_cached_blocks, pool.num_free_blocks) == (0, 7)
    pool.check({})


def test_our_own_bugs_are_noticed():
    pool = BlockPool(8)
    (block,) = pool.allocate(1)
    with pytest.raises(AssertionError, match="0 users"):
        pool.check({})
    pool.cache_block(block, b"hash", b"tokens")
    with pytest.raises(AssertionError, match="cached already"):
        pool.cache_block(block, b"other", b"tokens")
    pool.free([block])
    with pytest.raises(AssertionError, match="once too often"):
        pool.free([block])
    with pytest.raises(AssertionError, match="is free"):
        pool.cache_block(block, b"hash", b"tokens")


class PoolMachine(RuleBasedStateMachine):
    """Block tables that take, share, cache and give back blocks, beside a model of who holds what."""

    @initialize(num_blocks=st.integers(2, 9))
    def start(self, num_blocks) -> None:
        self.pool = BlockPool(num_blocks)
        self.tables: list[list[Block]] = []
        self.names: dict[bytes, Block] = {}
        self.num_names = 0

    @rule(count=st.integers(1, 4))
    def allocate(self, count) -> None:
        if count <= self.pool.num_free_blocks:
            blocks = self.pool.allocate(count)
            assert not {block.id for block in blocks} & {block.id for table in self.tables for block in table}
            self.names = {name: block for name, block in self.names.items() if block not in blocks}
            self.tables.append(blocks)

    @rule(index=st.integers(0, 9))
    def free(self, index) -> None:
        if self.tables:
            self.pool.free(self.tables.pop(index % len(self.tables)))

    @rule(index=st.integers(0, 9))
    def cache(self, index) -> None:
        for block in self.tables[index % len(self.tables)] if self.tables else []:
            if block.hash is None:
                self.num_names += 1
                name = str(self.num_names).encode()
                self.pool.cache_block(block, name, name)
                self.names[name] = block

    @rule(index=st.integers(0, 9))
    def share(self, index) -> None:
        if self.names:
            name = sorted(self.names)[index % len(self.names)]
            block = self.pool.lookup(name, name)
            assert block is self.names[name]
            self.pool.touch([block])
            self.tables.append([block])

    @rule()
    def reset(self) -> None:
        if self.pool.reset_prefix_cache():
            assert not self.tables
            self.names = {}

    @invariant()
    def agrees_with_the_model(self) -> None:
        if hasattr(self, "pool"):
            users = Counter(block.id for table in self.tables for block in table)
            self.pool.check(users)
            assert self.pool.num_free_blocks == self.pool.num_usable_blocks - len(users)
            assert all(self.pool.lookup(name, name) is block for name, block in self.names.items())
            assert self.pool.num_cached_blocks == len(self.names)


PoolMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=20, deadline=None)
TestPool = PoolMachine.TestCase
