"""The prefix cache by hash: which prefix of a request is cached or being computed, and what rows publish in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from ringcore.kv_cache.attention_kinds import FullAttentionManager
from ringcore.kv_cache.awaited_blocks import AwaitedBlocks
from ringcore.kv_cache.block_hash import BlockHasher
from ringcore.kv_cache.block_pool import BlockPool
from ringcore.kv_cache.cache_user import CacheUser
from ringcore.kv_cache.cached_prefix import CachedPrefix, find_longest_prefix
from ringcore.kv_cache.group_manager import GroupManager
from ringcore.kv_cache.unhashed_blocks import UnhashedBlocks

__all__ = ["PrefixIndex"]


class PrefixIndex:
    """Requests have a hash every `hasher.block_size` tokens; prefixes are whole spans, of as many tokens as all block
    sizes divide.

    needs_hashes: whether every published block must have its hash, as a store has it by name.
    """

    def __init__(
        self, groups: Sequence[GroupManager], pool: BlockPool, hasher: BlockHasher, needs_hashes: bool
    ) -> None:
        sizes = [group.block_size for group in groups]
        assert hasher.block_size == min(sizes), "one chain of hashes, in the smallest blocks"
        assert not any(size % min(sizes) for size in sizes), "a block is a whole number of the smallest ones"
        self._groups, self._pool, self._hasher, self._needs_hashes = groups, pool, hasher, needs_hashes
        self.span = math.lcm(*sizes)
        self._hashes_per_span = self.span // hasher.block_size
        # Spans, by the hash at their end.
        self._awaited = AwaitedBlocks(len(groups[0].num_blocks), self._span_name)
        self._misses = [CachedPrefix(0, 0, tuple([[] for _ in groups]), is_awaited) for is_awaited in (False, True)]
        # Without the first block of these there is no hit: its number among the hashes, and those that are cached.
        self._first_blocks = (
            [] if needs_hashes else [group.first_block() for group in groups if isinstance(group, FullAttentionManager)]
        )
        self._unhashed = None if needs_hashes else self._make_unhashed()

    def _make_unhashed(self) -> UnhashedBlocks | None:
        """None for several groups, each of which shortens the hits of others, and for a window, which frees its first
        blocks first."""
        group = self._groups[0]
        if len(self._groups) > 1 or not isinstance(group, FullAttentionManager):
            return None
        group.unhashed = UnhashedBlocks(self._pool, self._hasher, group.tokens_of)
        return group.unhashed

    # Waiting requests.

    def no_prefix(self) -> CachedPrefix:
        """A miss: the request computes all of its tokens."""
        return self._misses[False]

    def find(self, request: CacheUser, before_lookup: Callable[[], None]) -> CachedPrefix:
        """The longest prefix that every group has. before_lookup: called unless nothing can be found."""
        num_tokens, step = len(request.tokens), self._hashes_per_span
        limit = num_tokens // self.span * self.span
        if not limit:
            return self.no_prefix()
        hashes = request.block_hashes
        if len(hashes) < step:
            self._hash(request, step)
        for at, cached in self._first_blocks:
            if hashes[at] not in cached:
                return self._misses[self._awaited.has(hashes[step - 1 : step])]
        before_lookup()
        self._hash(request, limit // self._hasher.block_size)
        found = find_longest_prefix(self._groups, hashes, request.tokens, limit, self.span, self._pool)
        num_cached = len(found[0]) * self._groups[0].block_size
        end = (num_cached // self.span + 1) * step  # of the next span
        is_awaited = num_cached < limit and self._awaited.has(hashes[step - 1 : end : step])
        return CachedPrefix(
            min(num_cached, num_tokens - 1), num_cached, tuple(ids.tolist() for ids in found), is_awaited
        )

    def _hash(self, request: CacheUser, num_hashes: int) -> None:
        self._hasher.extend(request.block_hashes, request.tokens, num_hashes, request.extra_keys)

    # Rows.

    def start(self, row: int, request: CacheUser, prefix: CachedPrefix) -> None:
        """The row's full spans of known tokens after its prefix are awaited from now on."""
        first, end = prefix.num_cached_tokens // self.span, len(request.tokens) // self.span
        self._awaited.add(row, request, first, end)

    def _span_name(self, request: CacheUser, span: int) -> bytes:
        """The hash at the end of this span, of tokens that the request had when it started."""
        end = (span + 1) * self._hashes_per_span
        if len(request.block_hashes) < end:
            self._hash(request, end)
        return request.block_hashes[end - 1]

    def publish(
        self, rows: np.ndarray, token_ids: np.ndarray, num_confirmed: np.ndarray, users: Sequence[CacheUser]
    ) -> None:
        """Puts the full blocks of these rows up to num_confirmed[i] tokens into the cache, some without a hash."""
        if self._unhashed is None:
            num_hashes = (num_confirmed // self._hasher.block_size).tolist()
            for row, num, user in zip(rows.tolist(), num_hashes, users, strict=True):
                self._hasher.extend(user.block_hashes, token_ids[row], num, user.extra_keys)
        self._awaited.drop_first(rows, num_confirmed // self.span)
        for group in self._groups:
            group.publish(rows, token_ids, num_confirmed, users)

    def stop(self, rows: np.ndarray) -> None:
        """These rows compute and publish no more."""
        self._awaited.drop(rows)
        if self._unhashed is not None:
            self._unhashed.stop(rows)

    def check(self, publish_at: dict[int, int]) -> None:
        """By row in use: the number of confirmed tokens at which it next has a block to publish."""
        if self._unhashed is not None:
            self._unhashed.check()
        num_published = {row: (count - self._hasher.block_size) // self.span for row, count in publish_at.items()}
        self._awaited.check(num_published)
