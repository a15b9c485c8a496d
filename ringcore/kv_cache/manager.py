"""The KV cache manager, the scheduler's interface: slot allocation for rows, and prefix cache hits for prompts.

A row is a running request. A decode step costs one vectorized comparison over all rows; only rows that cross a block
boundary cost more.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Mapping
from functools import reduce
from typing import Protocol

import numpy as np

from ringcore.kv_cache.awaited_blocks import AwaitedBlocks
from ringcore.kv_cache.block_hash import BlockHasher, ExtraKeys
from ringcore.kv_cache.block_pool import BlockPool
from ringcore.kv_cache.cached_prefix import CachedPrefix, find_longest_prefix
from ringcore.kv_cache.group_manager import SlidingWindowManager, make_group_manager
from ringcore.kv_cache.spec import KVCacheConfig

__all__ = ["CacheUser", "CachedPrefix", "KVCacheManager"]


class CacheUser(Protocol):
    """The attributes of a request, waiting or running, that the manager reads; it writes `block_hashes`."""

    tokens: array[int]  # the tokens known at its start, as array('i'); it may grow later
    extra_keys: ExtraKeys
    block_hashes: list[bytes]  # of its leading full blocks of the smallest block size, extended lazily


class KVCacheManager:
    """The blocks of every KV cache group, and the prefix cache over them. All groups share one block pool.

    Without `enable_prefix_caching` nothing is hashed and every lookup misses. `hasher` hashes blocks of the smallest
    block size of any group; the default one has a random root in each process.

    A block can be hit once it is published: its tokens are confirmed, and no step in flight writes to its slots. So
    the blocks of a step are not shared before its output has been processed; `CachedPrefix.is_awaited` tells that a
    running request is computing the next block of a prefix.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        *,
        max_num_seqs: int,
        enable_prefix_caching: bool = True,
        hasher: BlockHasher | None = None,
    ) -> None:
        sizes = [group.spec.block_size for group in config.groups]
        self._hash_block_size, self._alignment = min(sizes), math.lcm(*sizes)
        assert not any(size % self._hash_block_size for size in sizes), "a block is a whole number of the smallest ones"
        self._hasher = hasher or BlockHasher(self._hash_block_size)
        assert self._hasher.block_size == self._hash_block_size, "one chain of hashes, in the smallest blocks"
        self.config = config
        self.enable_prefix_caching = enable_prefix_caching
        self._pool = BlockPool(config.num_blocks, len(sizes))
        self._groups = [
            make_group_manager(
                group.spec,
                index,
                self._pool,
                hash_block_size=self._hash_block_size,
                alignment=self._alignment,
                max_num_seqs=max_num_seqs,
                max_model_len=config.max_model_len,
            )
            for index, group in enumerate(config.groups)
        ]
        self._window_groups = [group for group in self._groups if isinstance(group, SlidingWindowManager)]
        self._max_num_tokens = config.max_num_tokens(self.num_usable_blocks)
        self._users: dict[int, CacheUser] = {}  # by row in use
        self._awaited = AwaitedBlocks()  # chunks of `_alignment` tokens, by the hash at their end
        # By row, in tokens: the slots allocated in every group; and the numbers of confirmed tokens at which the next
        # block is to be published, and the next one slides out of a window.
        self.capacity = np.zeros(max_num_seqs, np.int64)
        self._next_publish = np.zeros(max_num_seqs, np.int64)
        self._next_release = np.zeros(max_num_seqs, np.int64)
        self._num_cached = np.zeros(max_num_seqs, np.int64)  # tokens of its prefix cache hit

    @property
    def has_windows(self) -> bool:
        """Whether a group has a sliding window, so that confirmed tokens free blocks (`release_window`)."""
        return bool(self._window_groups)

    @property
    def num_usable_blocks(self) -> int:
        return self._pool.num_usable_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Blocks in the prefix cache, in use or free."""
        return self._pool.num_cached_blocks

    @property
    def max_num_tokens(self) -> int:
        """The most tokens of a single request that fit the whole cache."""
        return self._max_num_tokens

    def blocks_needed(self, num_tokens: int) -> int:
        """The peak number of blocks of one request that grows to `num_tokens` tokens."""
        return self.config.blocks_needed(num_tokens)

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether a request of `num_tokens` fits an otherwise empty cache."""
        return self.blocks_needed(num_tokens) <= self.num_usable_blocks

    # Waiting requests.

    def no_prefix(self) -> CachedPrefix:
        """For a request that computes all of its tokens."""
        return CachedPrefix(0, 0, tuple([] for _ in self._groups), is_awaited=False)

    def find_cached_prefix(self, request: CacheUser) -> CachedPrefix:
        """The longest prefix cached in every group. Adds no reference: valid only until blocks are allocated."""
        num_tokens = len(request.tokens)
        limit = num_tokens // self._alignment * self._alignment
        if not self.enable_prefix_caching or not limit:
            return self.no_prefix()
        hashes = request.block_hashes
        self._hasher.extend(hashes, request.tokens, limit // self._hash_block_size, request.extra_keys)
        found = find_longest_prefix(self._groups, hashes, np.asarray(request.tokens), limit, self._alignment)
        num_cached = len(found[0]) * self._groups[0].block_size
        next_hash = (num_cached + self._alignment) // self._hash_block_size - 1
        is_awaited = num_cached < limit and hashes[next_hash] in self._awaited
        return CachedPrefix(
            min(num_cached, num_tokens - 1), num_cached, tuple(ids.tolist() for ids in found), is_awaited
        )

    def blocks_to_start(self, num_tokens: int, prefix: CachedPrefix) -> int:
        """How many free blocks a request that grows to `num_tokens` may take: new ones, and those of `prefix` without a
        reference.
        """
        return self._num_to_take(num_tokens, prefix.held_block_ids())

    def _num_to_take(self, num_tokens: int, in_prefix: np.ndarray) -> int:
        return self.blocks_needed(num_tokens) - len(in_prefix) + self._pool.num_unreferenced(in_prefix)

    # Rows.

    def start(self, row: int, request: CacheUser, num_tokens: int, num_tokens_now: int, prefix: CachedPrefix) -> bool:
        """Starts an unused row with `prefix`, looked up just before. False, with no change, unless blocks for
        `num_tokens` tokens are free.

        A full-attention group allocates slots for all of these at once; a sliding-window group for `num_tokens_now`,
        the end of the first chunk. The blocks of known tokens that the row will compute become awaited.
        """
        assert row not in self._users, f"row {row} is in use"
        in_prefix = prefix.held_block_ids()
        if self._num_to_take(num_tokens, in_prefix) > self.num_free_blocks:
            return False
        self._pool.touch(in_prefix)  # before any allocation, which could evict them
        for group, ids in zip(self._groups, prefix.block_ids, strict=True):
            group.start(row, ids, group.num_slots_at_start(num_tokens, num_tokens_now))
        self._users[row] = request
        if self.enable_prefix_caching:
            self._await(row, request, prefix.num_cached_tokens // self._alignment)
        self._num_cached[row] = prefix.num_cached_tokens
        at = np.array([row])
        self.capacity[at], self._next_publish[at], self._next_release[at] = (
            self._slots(at),
            self._publish_at(at),
            self._release_at(at),
        )
        return True

    def _await(self, row: int, request: CacheUser, first: int) -> None:
        """Registers the row's chunks of `_alignment` known tokens, from number `first` on, as awaited."""
        hashes, step = request.block_hashes, self._alignment // self._hash_block_size
        end = len(request.tokens) // self._alignment
        self._hasher.extend(hashes, request.tokens, end * step, request.extra_keys)
        self._awaited.add(row, first, hashes[(first + 1) * step - 1 : end * step : step])

    def block_ids(self, row: int) -> list[np.ndarray]:
        """By group the row's block table, [num_blocks] int32, 0 (null block) for blocks out of the window. A copy."""
        return [group.table(row) for group in self._groups]

    def num_unshared_blocks(self, row: int, prefix: CachedPrefix | None = None) -> int:
        """The blocks that `free` would make free: those with reference count 1 and not in `prefix`."""
        ids = self._live_blocks(row)
        if prefix is not None:
            ids = ids[~np.isin(ids, prefix.held_block_ids())]
        return int(np.count_nonzero(self._pool.ref_counts[ids] == 1))

    def blocks_missing(self, rows: np.ndarray, num_tokens: np.ndarray) -> int:
        """The number of blocks to allocate so that row i has slots for num_tokens[i] tokens."""
        return sum(int(group.num_missing(rows, num_tokens).sum()) for group in self._groups)

    def extend(self, rows: np.ndarray, num_tokens: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Allocates slots so that row i has num_tokens[i]; enough blocks must be free (`blocks_missing`).

        By group: rows (with repetitions) and the blocks appended to their tables, both [n] int32.
        """
        taken = [group.extend(rows, num_tokens) for group in self._groups]
        self.capacity[rows] = self._slots(rows)
        return taken

    def extend_by_one(self, rows: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """`extend` by one token, for rows [n] int32 without a free slot: the fast path of decoding."""
        if len(self._groups) > 1:  # some groups may still have a free slot
            return self.extend(rows, self.capacity[rows] + 1)
        (group,) = self._groups
        block_ids = group.extend_by_one(rows)
        self.capacity[rows] += group.block_size
        return [(rows, block_ids)]

    def publish(self, rows: np.ndarray, token_ids: np.ndarray, num_confirmed: np.ndarray) -> None:
        """Inserts the rows' full blocks, up to num_confirmed[i] tokens, into the prefix cache, output tokens included.

        token_ids: [max_num_seqs, max_model_len] int32, by row. Confirmed tokens are those of completed steps: their
        slots are written, and no step in flight writes to them again.
        """
        if not self.enable_prefix_caching:
            return
        due = (num_confirmed >= self._next_publish[rows]).nonzero()[0]
        if not len(due):
            return
        rows, num_confirmed = rows[due], num_confirmed[due]
        hashes = []
        for row, count in zip(rows.tolist(), num_confirmed.tolist(), strict=True):
            user = self._users[row]
            self._hasher.extend(user.block_hashes, token_ids[row], count // self._hash_block_size, user.extra_keys)
            self._awaited.drop_first(row, count // self._alignment)
            hashes.append(user.block_hashes)
        for group in self._groups:
            group.publish(rows, token_ids, num_confirmed, hashes)
        self._next_publish[rows] = self._publish_at(rows)

    def release_window(self, rows: np.ndarray, num_confirmed: np.ndarray) -> bool:
        """Frees the blocks to which no token from position num_confirmed[i] on attends; whether there were any.

        The caller has published those that the prefix cache is to keep.
        """
        if not self._window_groups:
            return False
        due = (num_confirmed >= self._next_release[rows]).nonzero()[0]
        if not len(due):
            return False
        rows, num_confirmed = rows[due], num_confirmed[due]
        for group in self._window_groups:
            group.release(rows, num_confirmed)
        self._next_release[rows] = self._release_at(rows)
        return True

    def free(self, row: int) -> None:
        """Drops the row's reference to each of its blocks, last one first. Published blocks stay in the prefix cache
        until evicted; the caller has published the confirmed ones.
        """
        del self._users[row]
        self._awaited.drop(row)
        self._pool.free(self._live_blocks(row)[::-1])
        for group in self._groups:
            group.clear(row)
        self.capacity[row] = 0

    def _live_blocks(self, row: int) -> np.ndarray:
        """The blocks referenced by the row, over all groups in token order. [n] int64."""
        if len(self._groups) == 1:
            return self._groups[0].live_blocks(row)
        ids = [group.live_blocks(row) for group in self._groups]
        ends = [
            (group.num_out_of_window[row] + np.arange(1, len(own) + 1)) * group.block_size
            for group, own in zip(self._groups, ids, strict=True)
        ]
        return np.concatenate(ids)[np.argsort(np.concatenate(ends), kind="stable")]

    def reset_prefix_cache(self) -> bool:
        """Drops every cached prefix; False, with no change, while a row is in use."""
        return not self._users and self._pool.reset_prefix_cache()

    # Derived columns by row, and invariants.

    def _slots(self, rows: np.ndarray) -> np.ndarray:
        return _least([group.num_blocks[rows] * group.block_size for group in self._groups])

    def _publish_at(self, rows: np.ndarray) -> np.ndarray:
        return _least([(group.num_published[rows] + 1) * group.block_size for group in self._groups])

    def _release_at(self, rows: np.ndarray) -> np.ndarray:
        if not self._window_groups:
            return np.zeros(len(rows), np.int64)
        return _least([group.release_at(rows) for group in self._window_groups])

    def check(self, num_computed: Mapping[int, int], num_confirmed: Mapping[int, int]) -> None:
        """Recomputes all derived counts from the tables. By row in use: scheduled tokens, and confirmed tokens."""
        assert self._users.keys() == num_computed.keys() == num_confirmed.keys(), "rows in use"
        users: Counter[int] = Counter()
        for row, user in self._users.items():
            ids = self._live_blocks(row).tolist()
            assert len(set(ids)) == len(ids), f"row {row}: a block is twice in its tables"
            users.update(ids)
            assert num_confirmed[row] <= num_computed[row] <= self.capacity[row], f"row {row}: a token without a slot"
            num_known = max(num_confirmed[row], int(self._num_cached[row]))
            for group in self._groups:
                group.check_row(row, user.block_hashes, num_confirmed[row], num_known, self.config.max_tokens_in_flight)
        self._pool.check(users)
        rows = np.array([*self._users], np.int64)
        assert (self.capacity[rows] == self._slots(rows)).all(), "capacity disagrees with the tables"
        assert not np.delete(self.capacity, rows).any(), "a row that is not in use has slots"
        assert (self._next_publish[rows] == self._publish_at(rows)).all(), "next_publish disagrees with the tables"
        assert (self._next_release[rows] == self._release_at(rows)).all(), "next_release disagrees with the tables"
        num_published = (self._publish_at(rows) - self._hash_block_size) // self._alignment
        self._awaited.check(dict(zip(rows.tolist(), num_published.tolist(), strict=True)))


def _least(columns: list[np.ndarray]) -> np.ndarray:
    """The elementwise minimum of the columns."""
    least: np.ndarray = reduce(np.minimum, columns)
    return least
