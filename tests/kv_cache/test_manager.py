"""A cache of 8 blocks of 4 tokens, one of them the null block: 28 slots."""

from __future__ import annotations

from array import array

import pytest

from ringcore.kv_cache.block_hash import BlockHasher
from ringcore.kv_cache.block_pool import Block
from ringcore.kv_cache.manager import KVCacheManager
from ringcore.kv_cache.spec import FullAttentionSpec

SPEC = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="float32")


class User:
    """A request, as far as the cache sees one."""

    def __init__(self, tokens, salt: str | None = None) -> None:
        self.tokens = array("i", tokens)
        self.num_computed_tokens = 0
        self.num_confirmed_tokens = 0
        self.cache_salt = salt
        self.blocks: list[Block] = []
        self.block_hashes: list[bytes] = []
        self.num_published_blocks = 0

    @property
    def block_ids(self) -> list[int]:
        return [block.id for block in self.blocks]


def manager(num_blocks: int = 8, caching: bool = True, **kwargs) -> KVCacheManager:
    return KVCacheManager(SPEC, num_blocks, caching, **kwargs)


def run(cache: KVCacheManager, user: User, num_computed: int | None = None) -> User:
    """Computes the user's tokens, or the first `num_computed` of them, and publishes."""
    blocks, num_cached = cache.find_cached_prefix(user)
    assert cache.allocate(user, len(user.tokens) - num_cached, blocks) is not None
    user.num_computed_tokens = user.num_confirmed_tokens = len(user.tokens) if num_computed is None else num_computed
    cache.publish(user)
    cache.check([user])
    return user


def test_what_fits():
    cache = manager()
    assert (cache.num_usable_blocks, cache.max_num_tokens) == (7, 28)
    assert [cache.blocks_needed(n) for n in (0, 1, 4, 5, 28, 29)] == [0, 1, 1, 2, 7, 8]
    assert [cache.can_ever_fit(n) for n in (28, 29)] == [True, False]


def test_allocate_appends_what_is_missing():
    cache, user = manager(), User(range(6))
    assert cache.allocate(user, 6) == [1, 2]
    user.num_computed_tokens = 6
    assert cache.allocate(user, 2) == []
    assert cache.allocate(user, 3) == [3]
    assert user.block_ids == [1, 2, 3]


def test_allocate_refuses_and_changes_nothing():
    cache, user = manager(), User(range(29))
    assert cache.allocate(user, 29) is None
    assert (user.blocks, cache.num_free_blocks) == ([], 7)


@pytest.mark.parametrize(("length", "hit"), [(4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12), (20, 12)])
def test_a_hit_covers_whole_blocks_and_leaves_a_token(length, hit):
    cache = manager(num_blocks=20)
    cache.free(run(cache, User(range(12))))
    blocks, num_tokens = cache.find_cached_prefix(User(range(length)))
    assert (len(blocks) * 4, num_tokens) == (hit, hit)


def test_a_hit_ends_at_the_first_difference():
    cache = manager()
    cache.free(run(cache, User([*range(8), 1, 2, 3, 4])))
    blocks, num_tokens = cache.find_cached_prefix(User([*range(8), 1, 2, 3, 5, 6]))
    assert ([block.id for block in blocks], num_tokens) == ([1, 2], 8)


def test_a_hit_takes_cached_blocks_out_of_the_free_ones():
    cache = manager(num_blocks=4)
    cache.free(run(cache, User(range(8))))
    user = User(range(16))
    blocks, num_tokens = cache.find_cached_prefix(user)
    assert (len(blocks), num_tokens, cache.num_free_blocks) == (2, 8, 3)
    assert cache.allocate(user, 8, blocks) is None, "two of the three free blocks are the cached ones"
    assert (user.blocks, cache.num_free_blocks) == ([], 3)
    assert cache.allocate(user, 4, blocks) == [3]
    assert (user.block_ids, user.num_published_blocks) == ([1, 2, 3], 2)


def test_shared_while_in_use():
    cache = manager(num_blocks=5)
    first = run(cache, User(range(9)))
    second = User([*range(8), 50])
    blocks, num_tokens = cache.find_cached_prefix(second)
    assert cache.allocate(second, 1, blocks) == [4]
    second.num_computed_tokens = second.num_confirmed_tokens = num_tokens + 1
    cache.check([first, second])
    cache.free(first)
    cache.check([second])
    assert second.block_ids == [1, 2, 4]
    assert cache.num_free_blocks == 1


def test_only_confirmed_tokens_are_published():
    cache = manager(num_blocks=20)
    user = run(cache, User(range(12)), num_computed=0)
    user.num_computed_tokens, user.num_confirmed_tokens = 12, 7  # the rest is in a step in flight
    cache.publish(user)
    assert cache.find_cached_prefix(User(range(12)))[1] == 4
    user.num_confirmed_tokens = 12
    cache.publish(user)
    assert cache.find_cached_prefix(User(range(20)))[1] == 12


def test_generated_tokens_are_published():
    cache = manager(num_blocks=20)
    user = run(cache, User(range(6)))
    user.tokens.extend([70, 71, 72])
    cache.allocate(user, 2)
    user.num_computed_tokens = user.num_confirmed_tokens = 8
    cache.publish(user)
    cache.free(user)
    assert cache.find_cached_prefix(User([*range(6), 70, 71, 99]))[1] == 8
    assert cache.find_cached_prefix(User([*range(6), 70, 72, 99]))[1] == 4


def test_salts_are_kept_apart():
    cache = manager(num_blocks=20)
    run(cache, User(range(8), salt="a"))
    assert [cache.find_cached_prefix(User(range(9), salt))[1] for salt in ("a", "b", None)] == [8, 0, 0]


class CollidingHasher(BlockHasher):
    """Gives every first block the same name."""

    def digest(self, parent: bytes, block_token_bytes: bytes, extra_key: bytes = b"") -> bytes:
        return b"the same"


def test_a_collision_is_no_hit():
    cache = manager(hasher=CollidingHasher(4))
    run(cache, User(range(4)))
    assert cache.find_cached_prefix(User([*range(4), 9]))[1] == 4
    assert cache.find_cached_prefix(User([9, 1, 2, 3, 9]))[1] == 0


def test_off():
    cache = manager(caching=False)
    user = run(cache, User(range(8)))
    assert user.block_hashes == []
    cache.free(user)
    assert cache.find_cached_prefix(User(range(9))) == ([], 0)


def test_reset():
    cache = manager()
    user = run(cache, User(range(8)))
    assert cache.reset_prefix_cache() is False
    cache.free(user)
    assert cache.reset_prefix_cache() is True
    assert cache.find_cached_prefix(User(range(9))) == ([], 0)


def test_check_notices_a_wrong_table():
    cache = manager()
    user = run(cache, User(range(8)))
    with pytest.raises(AssertionError, match="users"):
        cache.check([])
    user.num_computed_tokens = 9
    with pytest.raises(AssertionError, match="without a slot"):
        cache.check([user])
