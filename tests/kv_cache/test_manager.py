"""A cache of full attention: 8 blocks of 4 tokens, one of them the null block, so 28 slots."""

from __future__ import annotations

import numpy as np
import pytest
from cache_driver import CacheDriver, User, cache_config, full, start_row

from ringcore.kv_cache.block_hash import BlockHasher, ExtraKeys
from ringcore.kv_cache.cached_prefix import CachedPrefix
from ringcore.kv_cache.manager import KVCacheManager


def test_what_fits():
    cache = CacheDriver().cache
    assert (cache.num_usable_blocks, cache.max_num_tokens, cache.has_windows) == (7, 28, False)
    assert [cache.blocks_needed(n) for n in (0, 1, 4, 5, 28, 29)] == [0, 1, 1, 2, 7, 8]
    assert [cache.can_ever_fit(n) for n in (28, 29)] == [True, False]
    assert CacheDriver(max_model_len=10).cache.max_num_tokens == 10


def test_a_row_begins_with_slots_for_all_tokens():
    driver = CacheDriver()
    assert driver.start(2, User(range(9)), num_now=4)
    assert driver.tables(2) == [[1, 2, 3]]
    assert driver.cache.capacity.tolist() == [0, 0, 12, 0]
    assert driver.cache.num_free_blocks == 4
    assert driver.start(0, User(range(20, 24)), num_tokens=16)
    assert driver.tables(0) == [[4, 5, 6, 7]]
    assert driver.cache.capacity.tolist() == [16, 0, 12, 0]
    driver.free(2)
    assert driver.cache.capacity.tolist() == [16, 0, 0, 0]


def test_a_row_that_does_not_fit_changes_nothing():
    driver = CacheDriver()
    assert not driver.start(0, User(range(29)))
    assert (driver.cache.num_free_blocks, driver.cache.capacity.any()) == (7, False)
    assert driver.start(0, User(range(28)))


def test_rows_are_extended_by_what_they_miss():
    driver = CacheDriver()
    for row, length in ((0, 4), (1, 3), (3, 4)):
        driver.start(row, User(range(10 * row, 10 * row + length)))
    wanted = (3, 5), (0, 11), (1, 4)
    assert driver.missing(*wanted) == 3
    assert driver.extend(*wanted) == [([3, 0, 0], [4, 5, 6])]
    assert [driver.tables(row) for row in (0, 1, 3)] == [[[1, 5, 6]], [[2]], [[3, 4]]]
    assert driver.cache.capacity.tolist() == [12, 4, 0, 8]
    assert driver.missing(*wanted) == 0
    assert driver.extend(*wanted) == [([], [])]
    assert driver.extend((0, 11), (1, 5)) == [([1], [7])]


def test_new_blocks_are_int32_on_the_wire():
    driver = CacheDriver()
    driver.start(0, User(range(4)))
    ((rows, ids),) = driver.cache.extend(np.array([0]), np.array([5]))
    (table,) = driver.cache.block_ids(0)
    assert (rows.dtype, ids.dtype, table.dtype) == (np.int32, np.int32, np.int32)
    table[:] = 9
    assert driver.tables(0) == [[1, 2]], "a copy"


@pytest.mark.parametrize(
    ("length", "computed", "cached"),
    [(3, 0, 0), (4, 3, 4), (5, 4, 4), (7, 4, 4), (8, 7, 8), (9, 8, 8), (12, 11, 12), (13, 12, 12), (20, 12, 12)],
)
def test_a_hit_covers_whole_blocks_and_leaves_a_token(length, computed, cached):
    driver = CacheDriver(num_blocks=20)
    driver.run(User(range(12)))
    prefix = driver.find(range(length))
    blocks = [1, 2, 3][: cached // 4]
    assert prefix == CachedPrefix(computed, cached, (blocks,), is_awaited=False)


def test_48_cached_tokens_in_blocks_of_16_are_a_hit_of_47():
    driver = CacheDriver(full(16))
    driver.run(User(range(48)))
    user = User(range(48))
    assert driver.cache.find_cached_prefix(user)[:3] == (47, 48, ([1, 2, 3],))
    assert driver.start(0, user)
    assert driver.tables(0) == [[1, 2, 3]], "one token is computed, and no block taken"
    driver.confirm(0, 48)
    assert driver.extend((0, 49)) == [([0], [4])]


def test_a_hit_ends_at_the_first_difference():
    driver = CacheDriver()
    driver.run(User([*range(8), 1, 2, 3, 4]))
    assert driver.find([*range(8), 1, 2, 3, 5, 6])[:3] == (8, 8, ([1, 2],))


def test_the_gate_counts_cached_blocks_that_nobody_uses():
    driver = CacheDriver(num_blocks=4)
    driver.run(User(range(8)))
    cache, user = driver.cache, User(range(16))
    prefix = cache.find_cached_prefix(user)
    assert (prefix.num_cached_tokens, cache.num_free_blocks) == (8, 3)
    assert cache.blocks_to_start(16, prefix) == 4, "two new ones, and two of the three free ones are the cached ones"
    assert not driver.start(0, user)
    assert cache.num_free_blocks == 3
    assert cache.blocks_to_start(12, prefix) == 3
    assert driver.start(0, User(range(12)))
    assert driver.tables(0) == [[1, 2, 3]]


def test_shared_while_in_use():
    driver = CacheDriver(num_blocks=5)
    driver.start(0, User(range(9)))
    driver.confirm(0)
    second = User([*range(8), 50])
    assert driver.cache.blocks_to_start(9, driver.cache.find_cached_prefix(second)) == 1
    assert driver.start(1, second)
    assert driver.tables(1) == [[1, 2, 4]]
    assert [driver.cache.num_unshared_blocks(row) for row in (0, 1)] == [1, 1]
    driver.free(0)
    assert driver.cache.num_free_blocks == 1
    assert driver.cache.num_unshared_blocks(1) == 3


def test_a_prefix_is_not_evicted_by_the_blocks_above_it():
    driver = CacheDriver(num_blocks=5)
    driver.run(User(range(16)))
    assert driver.start(0, User([*range(4), *range(50, 62)]))
    assert driver.tables(0) == [[1, 4, 3, 2]]


def test_only_confirmed_tokens_are_published():
    driver = CacheDriver(num_blocks=20)
    driver.start(0, User(range(12)))
    assert driver.find(range(12)).num_cached_tokens == 0
    driver.confirm(0, 7)  # the rest is in a step in flight
    assert driver.find(range(12)).num_cached_tokens == 4
    driver.confirm(0, 12)
    assert driver.find(range(20)).num_cached_tokens == 12


def test_rows_are_published_together_each_as_far_as_it_is():
    driver = CacheDriver(num_blocks=20)
    prompts = [list(range(100 * row, 100 * row + 12)) for row in range(3)]
    for row, prompt in enumerate(prompts):
        driver.start(row, User(prompt))
    driver.confirmed = {2: 12, 0: 5, 1: 3}
    driver.publish()
    assert [driver.find(prompt).num_cached_tokens for prompt in prompts] == [4, 0, 12]
    assert driver.cache.num_cached_blocks == 4


def test_generated_tokens_are_published():
    driver = CacheDriver(num_blocks=20)
    driver.start(0, User(range(6)))
    driver.confirm(0)
    driver.extend((0, 9))
    driver.token_ids[0, 6:9] = [70, 71, 72]
    driver.confirm(0, 8)
    driver.free(0)
    assert driver.find([*range(6), 70, 71, 99]).num_cached_tokens == 8
    assert driver.find([*range(6), 70, 72, 99]).num_cached_tokens == 4


def test_what_was_not_published_is_not_found():
    driver = CacheDriver()
    driver.start(0, User(range(8)))
    driver.confirm(0, publish=False)
    driver.free(0)
    assert driver.find(range(8)).num_cached_tokens == 0
    assert driver.cache.num_cached_blocks == 0


def test_of_twins_the_first_stays_the_one_found():
    """Both began before either had anything to share."""
    driver = CacheDriver()
    for row in (0, 1):
        assert start_row(driver.cache, row, User(range(9)), 9, 9, driver.cache.no_prefix())
        driver.token_ids[row, :9] = range(9)
        driver.computed[row], driver.confirmed[row] = 9, 4
    driver.publish()
    driver.confirmed = {0: 4, 1: 9}
    driver.publish()
    driver.confirm(0, 9)
    assert driver.tables(0) + driver.tables(1) == [[1, 2, 3], [4, 5, 6]]
    assert driver.find(range(9)).block_ids == ([1, 5],)
    driver.free(1)
    driver.free(0)
    assert driver.cache.num_cached_blocks == 2
    assert driver.start(0, User(range(50, 70)))
    assert driver.tables(0) == [[2, 3, 4, 6, 7]], "the two that are found are taken last"


@pytest.mark.parametrize(
    ("own", "others"),
    [
        (ExtraKeys("a"), [ExtraKeys(), ExtraKeys("b"), ExtraKeys("")]),
        (ExtraKeys(), [ExtraKeys("a"), ExtraKeys(adapter="a")]),
        (ExtraKeys(adapter="a"), [ExtraKeys(), ExtraKeys("a"), ExtraKeys("a", "a")]),
    ],
)
def test_salts_and_adapters_are_kept_apart(own, others):
    driver = CacheDriver()
    driver.run(User(range(8), own))
    assert driver.find(range(9), own).num_cached_tokens == 8
    assert [driver.find(range(9), other).num_cached_tokens for other in others] == [0] * len(others)


def test_images_are_kept_apart_from_the_block_that_shows_them():
    driver = CacheDriver()
    driver.run(User(range(12), ExtraKeys(item_hashes=((6, 3, b"cat"),))))
    hits = [driver.find(range(13), ExtraKeys(item_hashes=((6, 3, image),))) for image in (b"cat", b"dog")]
    assert [hit.num_cached_tokens for hit in hits] == [12, 4]


class CollidingHasher(BlockHasher):
    """Gives the blocks of one number the same name, whatever they hold."""

    def append(self, hashes, data, extra_keys=ExtraKeys()):  # noqa: B008
        first, num_blocks = len(hashes), len(data) // 4 // self.block_size
        hashes.extend(str(number).encode() for number in range(first, first + num_blocks))


def test_a_collision_is_no_hit():
    driver = CacheDriver()
    driver.cache = KVCacheManager(driver.config, max_num_seqs=4, hasher=CollidingHasher(4))
    driver.run(User(range(12)))
    assert driver.find([*range(12), 9]).num_cached_tokens == 12
    assert driver.find([*range(8), 1, 2, 3, 4]).num_cached_tokens == 8
    assert driver.find([9, *range(1, 12)]).num_cached_tokens == 0
    assert driver.find([*range(7), 1, *range(8, 12)]).block_ids == ([1],)


def test_a_block_that_a_running_row_computes_is_awaited():
    driver = CacheDriver(num_blocks=20)
    driver.start(0, User(range(14)), num_now=8)
    assert driver.find(range(9)) == CachedPrefix(0, 0, ([],), is_awaited=True)
    assert driver.find([*range(4), 9]).is_awaited
    assert not driver.find([*range(3), 9]).is_awaited, "another block"
    assert not driver.find(range(3)).is_awaited, "no full block"
    assert not driver.find(range(9), ExtraKeys("salt")).is_awaited
    driver.confirm(0)
    assert driver.find(range(14)) == CachedPrefix(8, 8, ([1, 2],), is_awaited=True)
    assert driver.find(range(8)) == CachedPrefix(7, 8, ([1, 2],), is_awaited=False)
    assert driver.find(range(11)) == CachedPrefix(8, 8, ([1, 2],), is_awaited=False)
    assert driver.find([*range(8), *range(4)]) == CachedPrefix(8, 8, ([1, 2],), is_awaited=False)
    driver.extend((0, 14))
    driver.confirm(0)
    assert not driver.find(range(16)).is_awaited, "it does not compute a fourth full block of what is known"


def test_a_row_that_goes_computes_nothing_more():
    driver = CacheDriver(num_blocks=20)
    for row in (0, 1):
        assert start_row(driver.cache, row, User(range(8)), 8, 8, driver.cache.no_prefix())
        driver.computed[row], driver.confirmed[row] = 8, 0
    for row, is_awaited in ((1, True), (0, False)):
        driver.free(row)
        assert driver.find(range(8)).is_awaited == is_awaited


def test_without_caching():
    driver, user = CacheDriver(caching=False), User(range(8))
    driver.start(0, user)
    assert driver.find(range(9)) == driver.cache.no_prefix() == CachedPrefix(0, 0, ([],), is_awaited=False)
    driver.confirm(0)
    driver.free(0)
    assert user.block_hashes == []
    assert driver.find(range(9)) == driver.cache.no_prefix()
    assert driver.cache.num_cached_blocks == 0


def test_reset_only_while_no_row_is_in_use():
    driver = CacheDriver()
    driver.start(0, User(range(8)))
    driver.confirm(0)
    assert driver.cache.reset_prefix_cache() is False
    assert driver.find(range(9)).num_cached_tokens == 8
    driver.free(0)
    assert driver.cache.reset_prefix_cache() is True
    assert driver.find(range(9)).num_cached_tokens == 0
    driver.check()


def test_a_large_pool_costs_little():
    cache = KVCacheManager(cache_config(full(16), num_blocks=1_000_000, max_model_len=100_000), max_num_seqs=256)
    assert cache.num_free_blocks == 999_999
    user = User(range(64))
    assert start_row(cache, 255, user, 64, 64, cache.find_cached_prefix(user))
    assert cache.block_ids(255)[0].tolist() == [1, 2, 3, 4]


def test_check_notices():
    driver = CacheDriver()
    driver.start(0, User(range(8)))
    driver.confirm(0)
    cache = driver.cache
    with pytest.raises(AssertionError, match="rows in use"):
        cache.check({}, {})
    with pytest.raises(AssertionError, match="without a slot"):
        cache.check({0: 9}, {0: 8})
    with pytest.raises(AssertionError, match="published before"):
        cache.check({0: 8}, {0: 7})
    cache.capacity[0] = 12
    with pytest.raises(AssertionError, match="capacity"):
        cache.check({0: 8}, {0: 8})
    cache.capacity[0] = 8
    cache.capacity[1] = 4
    with pytest.raises(AssertionError, match="not in use has slots"):
        cache.check({0: 8}, {0: 8})
