"""A pool of 8 blocks, one of them the null block."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from samples import num_examples

from ringcore.kv_cache.block_pool import BlockPool


def names(*ids: int) -> list[bytes]:
    return [str(block_id).encode() for block_id in ids]


def take(pool: BlockPool, num_blocks: int) -> list[int]:
    return pool.allocate(num_blocks).tolist()


def free(pool: BlockPool, *ids: int) -> None:
    """As a row gives them back: its last block first."""
    pool.free(np.array(ids[::-1], np.int64))


def touch(pool: BlockPool, *ids: int) -> None:
    pool.touch(np.array(ids, np.int64))


def cache(pool: BlockPool, *ids: int, group: int = 0) -> None:
    pool.cache(group, np.array(ids, np.int64), names(*ids))


def find(pool: BlockPool, *ids: int, group: int = 0) -> list[int]:
    return pool.lookup(group, names(*ids)).tolist()


def test_the_null_block_is_never_handed_out():
    pool = BlockPool(8)
    assert (pool.num_usable_blocks, pool.num_free_blocks) == (7, 7)
    assert take(pool, 0) == []
    assert take(pool, 7) == [1, 2, 3, 4, 5, 6, 7]
    assert pool.num_free_blocks == 0
    with pytest.raises(AssertionError, match="not so many"):
        take(pool, 1)


def test_blocks_that_hold_nothing_are_reused_while_warm_and_in_order():
    pool = BlockPool(8)
    first, second = take(pool, 2), take(pool, 3)
    free(pool, *first)
    free(pool, *second)
    assert take(pool, 6) == [3, 4, 5, 1, 2, 6]


def test_blocks_without_a_hash_go_before_cached_ones():
    pool = BlockPool(8)
    blocks = take(pool, 3)
    cache(pool, 1, 2)
    free(pool, *blocks)
    assert take(pool, 5) == [3, 4, 5, 6, 7]
    assert pool.num_cached_blocks == 2
    assert take(pool, 2) == [2, 1]


def test_a_prefix_outlives_its_tail_and_the_least_recent_goes_first():
    pool = BlockPool(8)
    old, new = take(pool, 3), take(pool, 4)
    cache(pool, *old, *new)
    free(pool, *old)
    free(pool, *new)
    assert take(pool, 7) == [3, 2, 1, 7, 6, 5, 4]
    assert pool.num_cached_blocks == 0


def test_a_cached_block_is_evicted_only_when_it_is_handed_out():
    pool = BlockPool(3)
    blocks = take(pool, 2)
    cache(pool, *blocks)
    free(pool, *blocks)
    assert find(pool, 1, 2) == [1, 2]
    assert take(pool, 1) == [2]
    assert find(pool, 1, 2) == [1]
    pool.check({2: 1})


def test_touch_takes_a_free_block_out_of_the_middle():
    pool = BlockPool(8)
    blocks = take(pool, 7)
    cache(pool, *blocks)
    free(pool, *blocks)
    assert pool.num_unreferenced(np.array([4, 5])) == 2
    touch(pool, 4)
    touch(pool, 4)
    assert pool.num_unreferenced(np.array([4, 5])) == 1
    assert (pool.num_free_blocks, pool.ref_counts[4]) == (6, 2)
    free(pool, 4)
    assert pool.num_free_blocks == 6
    assert take(pool, 6) == [7, 6, 5, 3, 2, 1]
    assert find(pool, 4) == [4]


def test_a_touched_block_becomes_the_most_recent():
    pool = BlockPool(4)
    blocks = take(pool, 3)
    cache(pool, *blocks)
    free(pool, *blocks)
    touch(pool, 3)
    free(pool, 3)
    assert take(pool, 3) == [2, 1, 3]


def test_two_tables_give_a_shared_block_back_at_once():
    pool = BlockPool(8)
    take(pool, 3)
    cache(pool, 1, 2, 3)
    touch(pool, 1, 2)
    free(pool, 1, 2, 1, 3)
    assert (pool.num_free_blocks, pool.ref_counts[[1, 2, 3]].tolist()) == (6, [0, 1, 0])
    pool.check({2: 1})


def test_a_lookup_ends_at_the_first_hash_that_is_not_there():
    pool = BlockPool(500)
    ids = take(pool, 499)
    cache(pool, *ids)
    assert find(pool) == []
    assert find(pool, *ids) == ids
    for missing in (0, 1, 63, 64, 65, 319, 320, 321, 498):
        asked = [*ids[:missing], 1000, *ids[missing + 1 :]]
        assert find(pool, *asked) == ids[:missing]


def test_of_duplicates_the_first_stays_cached():
    pool = BlockPool(8)
    take(pool, 4)
    pool.cache(0, np.array([1]), [b"same"])
    pool.cache(0, np.array([2, 3, 4]), [b"other", b"same", b"another"])
    assert pool.lookup(0, [b"same", b"other", b"another"]).tolist() == [1, 2, 4]
    assert [pool.hash_of(block_id) for block_id in (1, 2, 3, 4)] == [b"same", b"other", None, b"another"]
    free(pool, 1, 3)
    assert take(pool, 1) == [3]
    pool.check({2: 1, 3: 1, 4: 1})


def test_groups_find_their_own_blocks():
    pool = BlockPool(8, num_groups=2)
    blocks = take(pool, 2)
    pool.cache(0, np.array([1]), [b"same"])
    pool.cache(1, np.array([2]), [b"same"])
    assert [pool.lookup(group, [b"same"]).tolist() for group in (0, 1)] == [[1], [2]]
    assert [set(pool.hashes(group)) for group in (0, 1)] == [{b"same"}, {b"same"}]
    free(pool, *blocks)
    assert take(pool, 6) == [3, 4, 5, 6, 7, 2]
    assert [pool.lookup(group, [b"same"]).tolist() for group in (0, 1)] == [[1], []]


def test_reset_only_while_nothing_is_in_use():
    pool = BlockPool(8)
    blocks = take(pool, 2)
    cache(pool, *blocks)
    assert pool.reset_prefix_cache() is False
    assert find(pool, 1) == [1]
    free(pool, *blocks)
    assert pool.reset_prefix_cache() is True
    assert (pool.num_cached_blocks, pool.num_free_blocks, find(pool, 1)) == (0, 7, [])
    pool.check({})
    assert take(pool, 7) == [1, 2, 3, 4, 5, 6, 7]


def test_our_own_bugs_are_noticed():
    pool = BlockPool(8)
    take(pool, 1)
    with pytest.raises(AssertionError, match="users, counted"):
        pool.check({})
    cache(pool, 1)
    with pytest.raises(AssertionError, match="cached already"):
        pool.cache(0, np.array([1]), [b"other"])
    free(pool, 1)
    with pytest.raises(AssertionError, match="once too often"):
        free(pool, 1)
    with pytest.raises(AssertionError, match="free block cannot be cached"):
        pool.cache(0, np.array([2]), [b"more"])


@pytest.mark.parametrize(
    ("attribute", "wrong", "message"),
    [
        ("_num_empty", 4, "free blocks and reference counts"),
        ("_stack", np.array([2, 2, 3, 4, 5, 6, 7, 0], np.int32), "free twice"),
        ("_group_of", np.full(8, -1, np.int16), "a group, and no hash or stamp"),
        ("_cached", [{}], "maps and the blocks"),
    ],
)
def test_check_notices(attribute, wrong, message):
    pool = BlockPool(8)
    blocks = take(pool, 2)
    cache(pool, *blocks)
    free(pool, *blocks)
    pool.check({})
    setattr(pool, attribute, wrong)
    with pytest.raises(AssertionError, match=message):
        pool.check({})


class PoolMachine(RuleBasedStateMachine):
    """Block tables that take, share, cache and give back blocks, beside a model of who holds what."""

    @initialize(num_blocks=st.integers(2, 9), num_groups=st.integers(1, 2))
    def start(self, num_blocks, num_groups) -> None:
        self.pool = BlockPool(num_blocks, num_groups)
        self.num_groups = num_groups
        self.tables: list[list[int]] = []
        self.found: dict[tuple[int, bytes], int] = {}
        self.empty = list(range(num_blocks - 1, 0, -1))  # the next one last
        self.unused: list[int] = []  # the next one first
        self.num_names = 0

    def users(self) -> Counter[int]:
        return Counter(block_id for table in self.tables for block_id in table)

    @rule(count=st.integers(1, 4))
    def take(self, count) -> None:
        if count > self.pool.num_free_blocks:
            return
        expected = [self.empty.pop() if self.empty else self.unused.pop(0) for _ in range(count)]
        assert take(self.pool, count) == expected
        self.found = {name: block_id for name, block_id in self.found.items() if block_id not in expected}
        self.tables.append(expected)

    @rule(index=st.integers(0, 9), count=st.integers(1, 2))
    def free(self, index, count) -> None:
        """One table's blocks, or those of two at once."""
        gone = [self.tables.pop(index % len(self.tables)) for _ in range(min(count, len(self.tables)))]
        ids = [block_id for table in gone for block_id in table]
        free(self.pool, *ids)
        users, cached = self.users(), set(self.found.values())
        for block_id in dict.fromkeys(reversed(ids)):
            if not users[block_id]:
                (self.unused if block_id in cached else self.empty).append(block_id)

    @rule(index=st.integers(0, 9), group=st.integers(0, 1), old_name=st.booleans())
    def cache(self, index, group, old_name) -> None:
        if not self.tables:
            return
        group %= self.num_groups
        ids = [i for i in self.tables[index % len(self.tables)] if i not in self.found.values()]
        new_names = [str(self.num_names + count).encode() for count in range(len(ids))]
        if old_name and ids:
            new_names[0] = b"0"  # often there already
        self.num_names += len(ids)
        self.pool.cache(group, np.array(ids, np.int64), new_names)
        for name, block_id in zip(new_names, ids, strict=True):
            self.found.setdefault((group, name), block_id)

    @rule(index=st.integers(0, 9))
    def share(self, index) -> None:
        if self.found:
            block_id = sorted(self.found.values())[index % len(self.found)]
            touch(self.pool, block_id)
            self.tables.append([block_id])
            self.unused = [other for other in self.unused if other != block_id]

    @rule()
    def reset(self) -> None:
        assert self.pool.reset_prefix_cache() == (not self.tables)
        if not self.tables:
            self.found, self.unused, self.empty = {}, [], list(range(self.pool.num_usable_blocks, 0, -1))

    @invariant()
    def agrees_with_the_model(self) -> None:
        if hasattr(self, "pool"):
            users = self.users()
            self.pool.check(users)
            assert self.pool.num_free_blocks == self.pool.num_usable_blocks - len(users)
            assert self.pool.num_cached_blocks == len(self.found)
            for (group, name), block_id in self.found.items():
                assert self.pool.lookup(group, [name]).tolist() == [block_id]


PoolMachine.TestCase.settings = settings(max_examples=num_examples(40, 100), stateful_step_count=20, deadline=None)
TestPool = PoolMachine.TestCase
