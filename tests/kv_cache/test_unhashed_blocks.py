"""Blocks get their hashes when a lookup comes to them, and are found as if they had had them all along."""

from __future__ import annotations

import numpy as np
import pytest
from cache_driver import CacheDriver, User, full, start_row

from ringcore.kv_cache.block_hash import BlockHasher
from ringcore.kv_cache.manager import KVCacheManager


class CountingHasher(BlockHasher):
    num_hashed = 0

    def append(self, hashes, data, *extra_keys):
        before = len(hashes)
        super().append(hashes, data, *extra_keys)
        self.num_hashed += len(hashes) - before


@pytest.fixture
def hasher() -> CountingHasher:
    return CountingHasher(4, seed=1)


@pytest.fixture
def driver(hasher) -> CacheDriver:
    driver = CacheDriver(full(), num_blocks=20)
    driver.cache = KVCacheManager(driver.config, max_num_seqs=4, hasher=hasher)
    return driver


def test_prompts_that_share_nothing_have_one_hash_each(driver, hasher):
    for first in (0, 100, 200, 300):
        driver.run(User(range(first, first + 24)))
    assert hasher.num_hashed == 4
    assert driver.cache.num_cached_blocks == 19


def test_a_lookup_that_finds_the_first_block_finds_all(driver, hasher):
    driver.run(User(range(22)))
    assert driver.cache.num_cached_blocks == 5
    assert driver.find([*range(9), 99, 98, 97]).num_cached_tokens == 8
    assert driver.find(range(22)).num_cached_tokens == 20
    assert hasher.num_hashed == 1 + 3 + 4 + 5, "the prompt; the first lookup, and what it found; the second"
    driver.check()


def test_a_row_goes_on_after_its_blocks_got_hashes(driver):
    user = User(range(16))
    assert driver.start(0, user, num_tokens=32, num_now=12)
    driver.confirm(0)
    assert driver.find(range(16)).num_cached_tokens == 12
    driver.token_ids[0, :32] = range(32)
    driver.computed[0] = 32
    driver.confirm(0, 20)
    driver.confirm(0, 28)
    driver.confirm(0, 32)
    assert driver.find([*range(32), 9]).num_cached_tokens == 32
    driver.free(0)
    assert driver.find([*range(32), 9]).num_cached_tokens == 32


def test_what_is_left_of_it_after_an_eviction_is_found(driver):
    driver.run(User(range(40)))
    driver.run(User(range(100, 152)), row=1)  # 13 blocks, of which 9 are empty
    assert driver.find([*range(40), 9]).num_cached_tokens == 24
    driver.run(User(range(200, 264)), row=2)
    assert driver.find([*range(40), 9]).num_cached_tokens == 0
    assert driver.cache.num_cached_blocks == 19


def test_two_rows_that_compute_the_same_keep_one_of_each_block(driver):
    for row, count in ((0, 16), (1, 24)):
        assert start_row(driver.cache, row, User(range(count)), count, count, driver.cache.no_prefix())
        driver.token_ids[row, :count] = range(count)
        driver.computed[row] = driver.confirmed[row] = count
    driver.publish()
    assert driver.cache.num_cached_blocks == 6
    assert driver.find([*range(24), 9]).num_cached_tokens == 24
    driver.free(1)
    driver.free(0)
    assert driver.cache.num_cached_blocks == 6


def test_a_block_that_turns_out_to_be_double_is_empty(driver):
    """The first row's beginning is evicted while the end of the second, which computed it again, stays."""
    cache = driver.cache
    for row, count in ((0, 8), (1, 16)):
        assert start_row(cache, row, User(range(count)), count, count, cache.no_prefix())
        driver.token_ids[row, :count] = range(count)
        driver.computed[row] = driver.confirmed[row] = count
        driver.publish()
    driver.free(0)
    driver.run(User(range(100, 160)), row=2)  # evicts both blocks of the first row
    assert driver.find([*range(16), 9]).num_cached_tokens == 0
    driver.free(1)
    driver.run(User(range(16)))
    before = cache.num_free_blocks
    assert driver.find([*range(16), 9]).num_cached_tokens == 16
    assert cache.num_free_blocks == before
    driver.check()
    assert cache.reset_prefix_cache()
    assert (cache.num_cached_blocks, np.count_nonzero(cache.capacity)) == (0, 0)
    driver.check()
