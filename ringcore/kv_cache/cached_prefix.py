"""Prefix cache lookup: the longest prefix of a request that every KV cache group has."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from ringcore.kv_cache.group_manager import CachedBlocks, GroupManager

__all__ = ["CachedPrefix", "find_by_hash", "find_longest_prefix"]


class CachedPrefix(NamedTuple):
    """A prefix cache hit, a whole number of blocks in every group."""

    num_computed_tokens: int  # at most all but one: the last token must be computed to sample the next
    num_cached_tokens: int  # with cached slots: num_computed_tokens, or one more if all tokens are cached
    block_ids: tuple[list[int], ...]  # by group; 0, the null block, before what the next token sees
    is_awaited: bool  # a running request is computing the next block: waiting saves computing it twice

    def held_block_ids(self) -> np.ndarray:
        """The blocks of all groups, without null blocks. [n] int64."""
        ids = np.array([*chain.from_iterable(self.block_ids)], np.int64)
        held: np.ndarray = ids[ids != 0]
        return held


def find_longest_prefix(
    groups: Sequence[GroupManager],
    hashes: list[bytes],
    token_ids: np.ndarray,
    limit: int,
    alignment: int,
    cached: CachedBlocks,
) -> list[np.ndarray]:
    """By group, the blocks of the longest prefix of `token_ids`, of at most `limit` tokens. Each [n] int64.

    A group of full attention needs all blocks of the prefix, one of local attention those that the next token
    sees. A hit is confirmed by comparing the blocks' tokens; equality of what precedes a block follows from its hash.

    hashes: of the first `limit` tokens. token_ids: [num_tokens] int32, all of the request's. limit: a multiple of
    `alignment`, as the result is.
    """
    while True:
        found = find_by_hash(groups, hashes, len(token_ids), limit, alignment, cached)
        confirmed = min(group.num_confirmed_tokens(found[group.index], token_ids) for group in groups)
        if len(found[0]) * groups[0].block_size == confirmed:
            return found
        limit = confirmed // alignment * alignment


def find_by_hash(
    groups: Sequence[GroupManager],
    hashes: list[bytes],
    num_tokens: int,
    limit: int,
    alignment: int,
    cached: CachedBlocks,
) -> list[np.ndarray]:
    """`find_longest_prefix` by the hashes alone: each group may shorten the hit of the others, until all have the same
    length."""
    found: list[np.ndarray] = []
    for group in groups:
        found.append(group.find(hashes, num_tokens, limit, cached))
        limit = len(found[-1]) * group.block_size // alignment * alignment
    while True:
        longer = [group for group in groups if len(found[group.index]) * group.block_size > limit]
        if not longer:
            return found
        for group in longer:
            found[group.index] = group.shorten(found[group.index], hashes, num_tokens, limit, cached)
            limit = len(found[group.index]) * group.block_size // alignment * alignment
