"""What differs between KV cache groups of full and of local attention (a sliding window, or chunks): which blocks a row
needs."""

from __future__ import annotations

from collections.abc import KeysView
from functools import partial
from typing import assert_never

import numpy as np

from ringcore.kv_cache.block_pool import BlockPool
from ringcore.kv_cache.group_manager import CachedBlocks, GroupManager, cells_of_rows
from ringcore.kv_cache.spec import (
    ChunkedAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    LocalAttentionSpec,
    MLASpec,
    SlidingWindowSpec,
)

__all__ = ["FullAttentionManager", "LocalAttentionManager", "make_group_manager"]


class FullAttentionManager(GroupManager):
    """Full causal attention: every token attends to all before it."""

    has_all_slots_at_start = True  # with those of its first chunk alone a prefill could run out of blocks half way

    def num_skipped_blocks(self, num_computed_tokens: int) -> int:
        return 0

    def first_block(self) -> tuple[int, KeysView[bytes]]:
        """Which of a request's hashes is its first block's, and those of the cached blocks: without it nothing hits."""
        return self._hashes_per_block - 1, self._pool.hashes(self.index)

    def find(self, hashes: list[bytes], num_tokens: int, limit: int, cached: CachedBlocks) -> np.ndarray:
        names, lookup = self._block_hashes(hashes, 0, limit // self.block_size), partial(cached.lookup, self.index)
        return lookup(names) if self.unhashed is None else self.unhashed.find(names, lookup)

    def shorten(
        self, ids: np.ndarray, hashes: list[bytes], num_tokens: int, limit: int, cached: CachedBlocks
    ) -> np.ndarray:
        return ids[: limit // self.block_size]


class LocalAttentionManager(GroupManager):
    """A token attends to the last ones before it, those of its window or chunk; blocks before these are freed."""

    has_all_slots_at_start = False  # early blocks are freed before the last ones are allocated
    _spec: LocalAttentionSpec

    def num_skipped_blocks(self, num_computed_tokens: int) -> int:
        return self._spec.first_live_token(num_computed_tokens) // self.block_size

    def find(self, hashes: list[bytes], num_tokens: int, limit: int, cached: CachedBlocks) -> np.ndarray:
        """Searches from the end for consecutive cached blocks that cover the window or chunk."""
        step, names = self._hashes_per_block, cached.hashes(self.index)
        end, num_unneeded = self._needed(num_tokens, limit)
        begin = end  # from here to the end all are cached
        # The last block must be cached, even if the next token does not see it: with a window of 1, or in a new chunk.
        while begin > max(min(num_unneeded, end - 1), 0):
            begin -= 1
            if hashes[(begin + 1) * step - 1] in names:
                continue
            while begin > 0 and hashes[begin * step - 1] not in names:
                begin -= 1
            aligned = begin * self.block_size // self.alignment * self.alignment
            end, num_unneeded = self._needed(num_tokens, aligned)
            begin = end
        ids = cached.lookup(self.index, self._block_hashes(hashes, num_unneeded, end))
        return np.concatenate((np.zeros(num_unneeded, np.int64), ids))

    def _needed(self, num_tokens: int, num_cached: int) -> tuple[int, int]:
        """For a prefix of `num_cached` of the request's tokens: its number of blocks, and of leading ones not needed.

        If all tokens are cached, the last one is computed again, and attends to what it sees before it.
        """
        end = num_cached // self.block_size
        return end, min(self.num_skipped_blocks(min(num_cached, num_tokens - 1)), end)

    def shorten(
        self, ids: np.ndarray, hashes: list[bytes], num_tokens: int, limit: int, cached: CachedBlocks
    ) -> np.ndarray:
        """Searches again: a shorter prefix needs earlier blocks."""
        return self.find(hashes, num_tokens, limit, cached)

    def release(self, rows: np.ndarray, num_confirmed: np.ndarray) -> None:
        """Frees the blocks that no token from position num_confirmed[i] on attends to."""
        num_skipped = _first_live_tokens(self._spec, num_confirmed) // self.block_size
        first = self.num_null_blocks[rows]
        num_null_blocks = np.maximum(num_skipped, first)
        at_rows, at_blocks = cells_of_rows(rows, first, num_null_blocks - first)
        ids = self._tables[at_rows, at_blocks].astype(np.int64)
        self._tables[at_rows, at_blocks] = 0
        self.num_null_blocks[rows] = num_null_blocks
        self._pool.free(ids[::-1])

    def release_at(self, rows: np.ndarray) -> np.ndarray:
        """The number of confirmed tokens at which `release` next frees a block of the row. [n] int64."""
        next_live: np.ndarray = (self.num_null_blocks[rows] + 1) * self.block_size
        return _computed_before(self._spec, next_live)


def make_group_manager(spec: KVCacheSpec, index: int, pool: BlockPool, **sizes: int) -> GroupManager:
    """The manager of group `index` of the pool. `sizes`: the keywords of `GroupManager`."""
    match spec:
        case FullAttentionSpec() | MLASpec():
            return FullAttentionManager(spec, index, pool, **sizes)
        case SlidingWindowSpec() | ChunkedAttentionSpec():
            return LocalAttentionManager(spec, index, pool, **sizes)
        case _:
            assert_never(spec)


def _first_live_tokens(spec: LocalAttentionSpec, num_computed: np.ndarray) -> np.ndarray:
    """`first_live_token` of many rows."""
    match spec:
        case SlidingWindowSpec():
            in_window: np.ndarray = np.maximum(num_computed - (spec.sliding_window - 1), 0)
            return in_window
        case ChunkedAttentionSpec():
            in_chunk: np.ndarray = num_computed // spec.chunk_size * spec.chunk_size
            return in_chunk
        case _:
            assert_never(spec)


def _computed_before(spec: LocalAttentionSpec, first_live: np.ndarray) -> np.ndarray:
    """The fewest computed tokens of which the first live one is number first_live[i] or later."""
    match spec:
        case SlidingWindowSpec():
            return first_live + (spec.sliding_window - 1)
        case ChunkedAttentionSpec():
            next_chunk: np.ndarray = -(-first_live // spec.chunk_size) * spec.chunk_size
            return next_chunk
        case _:
            assert_never(spec)
