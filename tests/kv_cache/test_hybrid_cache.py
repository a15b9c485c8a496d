"""Groups with a sliding window, alone and beside full attention, in blocks of 4 tokens unless said."""

from __future__ import annotations

import pytest
from cache_driver import CacheDriver, User, full, window
from cache_driver import chunked as in_chunks

from ringcore.kv_cache.cached_prefix import CachedPrefix


def chunked(driver: CacheDriver, row: int, user: User, chunk: int) -> None:
    """All of the user's tokens, `chunk` of them a step, each confirmed before the next."""
    num_tokens = len(user.tokens)
    first = driver.cache.find_cached_prefix(user).num_computed_tokens
    assert driver.start(row, user, num_now=min(first + chunk, num_tokens))
    driver.confirm(row)
    for end in range(first + 2 * chunk, num_tokens + chunk, chunk):
        driver.extend((row, min(end, num_tokens)))
        driver.confirm(row)


def test_a_window_takes_slots_for_its_first_step_and_full_attention_for_all():
    driver = CacheDriver(full(), window(5), num_blocks=20, max_tokens_in_flight=4)
    assert driver.start(0, User(range(12)), num_now=4)
    assert driver.tables(0) == [[1, 2, 3], [4]]
    assert driver.cache.capacity[0] == 4
    assert driver.cache.has_windows
    assert driver.missing((0, 8)) == 1
    assert driver.extend((0, 8)) == [([], []), ([0], [5])]
    assert driver.cache.capacity[0] == 8


def test_the_gate_counts_the_most_that_a_window_comes_to_hold():
    """What the next token sees and 4 tokens: 8 tokens, in at most 3 blocks."""
    driver = CacheDriver(full(), window(5), num_blocks=20, max_tokens_in_flight=4)
    assert driver.cache.blocks_needed(40) == 10 + 3
    assert driver.cache.blocks_to_start(40, driver.cache.no_prefix()) == 13
    assert driver.start(0, User(range(40)), num_now=4)
    assert driver.cache.num_free_blocks == 19 - 10 - 1
    assert not driver.start(1, User(range(50, 80)), num_now=4), "11 blocks of the 8"
    assert driver.start(1, User(range(50, 70)), num_now=4), "8 blocks"


def test_a_window_gives_back_what_no_token_to_come_sees():
    driver = CacheDriver(window(5), num_blocks=8, max_tokens_in_flight=64)
    driver.start(0, User(range(20)))
    assert driver.tables(0) == [[1, 2, 3, 4, 5]]
    assert not driver.confirm(0, 7), "the token at 7 sees those from 3 on"
    assert driver.tables(0) == [[1, 2, 3, 4, 5]]
    assert driver.confirm(0, 8), "the token at 8 sees those from 4 on"
    assert driver.tables(0) == [[0, 2, 3, 4, 5]]
    assert (driver.cache.num_free_blocks, driver.cache.capacity[0]) == (3, 20)
    assert not driver.confirm(0, 11)
    assert driver.confirm(0, 17)
    assert driver.tables(0) == [[0, 0, 0, 4, 5]]
    assert driver.extend((0, 21)) == [([0], [6])]
    driver.free(0)
    assert driver.cache.num_free_blocks == 7


def test_a_chunk_is_given_back_when_the_next_begins():
    driver = CacheDriver(in_chunks(8), num_blocks=8, max_tokens_in_flight=64)
    driver.start(0, User(range(20)))
    assert not driver.confirm(0, 7)
    assert driver.confirm(0, 8), "the token at 8 begins a chunk"
    assert driver.tables(0) == [[0, 0, 3, 4, 5]]
    assert not driver.confirm(0, 15)
    assert driver.confirm(0, 16)
    assert driver.tables(0) == [[0, 0, 0, 0, 5]]


def test_a_hit_needs_the_blocks_of_the_next_tokens_chunk():
    """Of 8 positions. Two blocks of four tokens are a chunk."""
    driver = CacheDriver(full(), in_chunks(8), num_blocks=20)
    driver.run(User(range(16)))
    first, second, third, fourth = driver.find(range(17)).block_ids[0]
    assert driver.find(range(17)).block_ids == ([first, second, third, fourth], [0, 0, 0, 0]), "a chunk begins at 16"
    prefix = driver.find(range(15))
    assert prefix.num_cached_tokens == 12
    assert prefix.block_ids[1][:2] == [0, 0]
    assert prefix.block_ids[1][2] != 0, "the token at 12 sees those from 8 on"
    whole = driver.find(range(16))
    assert (whole.num_computed_tokens, whole.num_cached_tokens) == (15, 16)
    assert [block == 0 for block in whole.block_ids[1]] == [True, True, False, False], "the token at 15 comes again"


def test_blocks_that_a_window_left_behind_are_found_until_they_are_taken():
    driver = CacheDriver(window(5), num_blocks=6)
    driver.start(0, User(range(12)))
    driver.confirm(0)
    assert driver.tables(0) == [[0, 0, 3]]
    assert driver.find(range(6)).block_ids == ([1],)
    driver.extend((0, 24))
    assert driver.tables(0) == [[0, 0, 3, 4, 5, 2]], "of the cached ones the last block goes first"
    assert driver.find(range(6)).block_ids == ([1],)
    assert driver.find(range(9)) == CachedPrefix(4, 4, ([1],), is_awaited=False)


def test_two_rows_leave_a_shared_block_behind_at_once():
    driver = CacheDriver(window(5), num_blocks=12)
    driver.run(User(range(8)))
    for row in (0, 1):
        assert driver.start(row, User([*range(8), row, row, row, row]))
    assert driver.tables(0) + driver.tables(1) == [[0, 2, 3], [0, 2, 4]]
    driver.confirmed = {0: 12, 1: 12}
    assert driver.confirm(0)
    assert driver.tables(0) + driver.tables(1) == [[0, 0, 3], [0, 0, 4]]
    assert driver.cache.num_free_blocks == 9


def test_a_hit_needs_only_the_window():
    """The token at 12 sees those from 8 on; the first two blocks are gone."""
    driver = CacheDriver(window(5), num_blocks=5)
    driver.start(0, User(range(12)))
    driver.confirm(0)
    driver.extend((0, 20))
    assert driver.tables(0) == [[0, 0, 3, 4, 2]]
    assert driver.cache.num_cached_blocks == 2, "the first and the third"
    assert driver.find(range(13)) == CachedPrefix(12, 12, ([0, 0, 3],), is_awaited=False)
    assert driver.find(range(11)) == CachedPrefix(4, 4, ([1],), is_awaited=False), "at 8 it needs the second"
    user = User(range(13))
    driver.free(0)
    assert driver.start(1, user)
    assert driver.tables(1)[0][:3] == [0, 0, 3]
    assert driver.cache.num_unshared_blocks(1) == 2


@pytest.mark.parametrize(
    ("sliding_window", "num_tokens", "blocks"),
    [
        (1, 8, [0, 2]),  # token 7 is computed again: its block is read
        (1, 9, [0, 0]),  # token 8 sees itself alone
        (2, 9, [0, 2]),
        (4, 8, [0, 2]),  # token 7 sees 4 to 7
        (5, 8, [1, 2]),  # token 7 sees 3 to 7
        (5, 9, [0, 2]),  # token 8 sees 4 to 8
        (6, 9, [1, 2]),
    ],
)
def test_what_the_next_token_sees(sliding_window, num_tokens, blocks):
    driver = CacheDriver(window(sliding_window))
    driver.run(User(range(8)))
    prefix = driver.find(range(num_tokens))
    assert prefix == CachedPrefix(min(8, num_tokens - 1), 8, (blocks,), is_awaited=False)
    assert driver.start(0, User(range(num_tokens)))


def test_the_longest_prefix_that_every_group_has():
    driver = CacheDriver(full(), window(5), num_blocks=40, max_tokens_in_flight=4)
    chunked(driver, 0, User(range(16)), 4)
    driver.free(0)
    prefix = driver.find(range(17))
    assert prefix.num_cached_tokens == 16
    of_full, of_window = prefix.block_ids
    assert len(of_full) == len(of_window) == 4
    assert of_window[:3] == [0, 0, 0]
    shorter = driver.find([*range(13), 99, 99, 99, 99])
    assert shorter.num_cached_tokens == 12
    assert shorter.block_ids[0] == of_full[:3]
    assert shorter.block_ids[1][:2] == [0, 0]
    assert not {*shorter.block_ids[1]} & {*of_window[3:]}


def test_a_window_without_its_blocks_shortens_the_hit_of_full_attention():
    """The row gives back the blocks of 0 to 7 before they are published: only 8 to 15 are found in that group."""
    driver = CacheDriver(full(), window(5), num_blocks=40)
    driver.start(0, User(range(16)))
    driver.confirm(0, 12, publish=False)
    driver.confirm(0, 16)
    assert [driver.find(range(n)).num_computed_tokens for n in (7, 9, 13, 15, 16, 17)] == [0, 0, 12, 12, 15, 16]
    assert driver.find(range(9)).block_ids == ([], [])
    driver.free(0)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_blocks_of_two_sizes(order):
    """Full attention in blocks of 8, a window of 5 in blocks of 4: a prefix is a multiple of 8."""
    specs = full(8), window(5, block_size=4)
    driver = CacheDriver(*(specs[index] for index in order), num_blocks=40, max_tokens_in_flight=4)
    chunked(driver, 0, User(range(22)), 4)
    tables = driver.tables(0)
    assert [len(tables[index]) for index in order] == [3, 6]
    assert driver.cache.capacity[0] == 24
    hits = [driver.find(range(n)) for n in (7, 8, 12, 16, 17, 30)]
    assert [(hit.num_computed_tokens, hit.num_cached_tokens) for hit in hits] == [
        (0, 0), (7, 8), (8, 8), (15, 16), (16, 16), (16, 16),
    ]  # fmt: skip
    assert [len(hits[-1].block_ids[index]) for index in order] == [2, 4]
    assert driver.find([*range(12), 99, 99, 99, 99]).num_cached_tokens == 8
    driver.free(0)
    assert driver.cache.num_free_blocks == 39


def test_awaited_is_a_run_of_the_largest_block():
    driver = CacheDriver(full(8), full(4), num_blocks=40)
    driver.start(0, User(range(22)), num_now=12)
    assert driver.find(range(8)).is_awaited
    assert not driver.find(range(7)).is_awaited
    driver.confirm(0)
    assert driver.find(range(16)) == CachedPrefix(8, 8, ([1], [4, 5]), is_awaited=True)
    assert not driver.find(range(15)).is_awaited
    driver.extend((0, 16))
    driver.confirm(0)
    assert not driver.find(range(24)).is_awaited, "it knows no 24 tokens"


def test_a_freed_rows_last_tokens_go_first_in_all_groups():
    driver = CacheDriver(full(), full(), num_blocks=7)
    driver.run(User(range(12)))
    assert driver.find(range(12)).block_ids == ([1, 2, 3], [4, 5, 6])
    assert driver.start(0, User([90]))
    assert driver.find(range(12)).num_cached_tokens == 8, "one block each of the last tokens"
    assert sorted(driver.tables(0)[0] + driver.tables(0)[1]) == [3, 6]


def test_blocks_of_one_group_are_no_hit_in_another():
    driver = CacheDriver(full(), window(64), num_blocks=20)
    driver.run(User(range(8)))
    assert driver.find(range(8)).block_ids == ([1, 2], [3, 4])


@pytest.mark.parametrize("in_flight", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("sliding_window", [1, 2, 4, 5, 7])
def test_a_window_never_holds_more_than_was_admitted(sliding_window, in_flight):
    """The pool has not one block more than one request of 40 tokens was admitted for; `check` compares too."""
    driver = CacheDriver(window(sliding_window), num_blocks=40, max_tokens_in_flight=in_flight)
    bound = driver.cache.blocks_needed(40)
    driver = CacheDriver(window(sliding_window), num_blocks=bound + 1, max_tokens_in_flight=in_flight)
    assert driver.start(0, User(range(40)), num_now=in_flight)
    most = 0
    for confirmed in range(1, 41 - in_flight):
        driver.confirm(0, confirmed)
        driver.extend((0, confirmed + in_flight))
        most = max(most, bound - driver.cache.num_free_blocks)
    assert most == bound, "and comes to hold as many"


def test_without_caching_a_window_gives_back_all_the_same():
    driver = CacheDriver(full(), window(5), num_blocks=20, caching=False, max_tokens_in_flight=4)
    chunked(driver, 0, User(range(16)), 4)
    assert driver.tables(0)[1][:3] == [0, 0, 0]
    driver.free(0)
    assert (driver.cache.num_free_blocks, driver.cache.num_cached_blocks) == (19, 0)
