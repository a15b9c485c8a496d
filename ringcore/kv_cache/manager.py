"""The KV cache for the scheduler: allocates blocks for rows, and looks prompts up in the prefix cache.

A row stands for a running request. The checks of every step are one comparison of a column for all rows: only rows that
cross a block boundary cost more.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache, reduce

import numpy as np

from ringcore.kv_cache.attention_kinds import LocalAttentionManager, make_group_manager
from ringcore.kv_cache.block_hash import BlockHasher
from ringcore.kv_cache.block_pool import BlockPool
from ringcore.kv_cache.block_store import BlockStore
from ringcore.kv_cache.cache_user import CacheUser
from ringcore.kv_cache.cached_prefix import CachedPrefix
from ringcore.kv_cache.occupancy import Occupancy
from ringcore.kv_cache.prefix_index import PrefixIndex
from ringcore.kv_cache.spec import KVCacheConfig
from ringcore.kv_cache.stored_prefix import StoredPrefixes

__all__ = ["CacheUser", "CachedPrefix", "KVCacheManager"]

_NUM_KEPT = 1024  # lengths of requests whose blocks are counted once


class KVCacheManager:
    """The blocks of every KV cache group, and the prefix cache over them. All groups take their blocks from one pool.

    Without `enable_prefix_caching` no block is hashed and no prefix hits. `hasher` hashes blocks of the smallest block
    size of any group; by default one whose root is random in each process. `store` holds what the pool evicts,
    and `stored` finds it.

    A block can be hit once it is published: its tokens are confirmed, and no step in flight writes to its slots. So
    requests do not share blocks within the step that computes them, nor before its output has arrived;
    `CachedPrefix.is_awaited` says that waiting for it pays.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        *,
        max_num_seqs: int,
        enable_prefix_caching: bool = True,
        hasher: BlockHasher | None = None,
        store: BlockStore | None = None,
    ) -> None:
        sizes = [group.spec.block_size for group in config.groups]
        alignment, hasher = math.lcm(*sizes), hasher or BlockHasher(min(sizes))
        self.config, self.store, self.enable_prefix_caching = config, store, enable_prefix_caching
        self._pool = BlockPool(config.num_blocks, len(sizes))
        self._groups = [
            make_group_manager(
                group.spec,
                index,
                self._pool,
                hash_block_size=hasher.block_size,
                alignment=alignment,
                max_num_seqs=max_num_seqs,
                max_model_len=config.max_model_len,
            )
            for index, group in enumerate(config.groups)
        ]
        self._index = PrefixIndex(self._groups, self._pool, hasher, needs_hashes=store is not None)
        self.occupancy = Occupancy(self._pool, self._groups)
        self.stored = None if store is None else StoredPrefixes(store, self._pool, self._groups, alignment)
        self._window_groups = [group for group in self._groups if isinstance(group, LocalAttentionManager)]
        self.has_windows = bool(self._window_groups)  # then confirmed tokens free blocks (`release_window`)
        self._block_size = np.array(sizes[0])  # an array: numpy converts a Python number in each call
        self._max_num_tokens = config.max_num_tokens(self.num_usable_blocks)
        self.blocks_needed = lru_cache(_NUM_KEPT)(config.blocks_needed)  # the most of a request with so many tokens
        self._users: dict[int, CacheUser] = {}  # by row in use
        self._reserved: list[tuple[int, CachedPrefix, int, int]] = []  # rows that start, and the rest of `reserve`
        self._num_reserved = 0
        # By row, in tokens: the slots that it has in every group; and the numbers of confirmed tokens at which it next
        # has a block to publish, and one to free; its prefix cache hit when it started.
        self.capacity = np.zeros(max_num_seqs, np.int64)
        self._next_publish, self._next_release, self._num_cached = np.zeros((3, max_num_seqs), np.int64)

    @property
    def num_usable_blocks(self) -> int:
        return self._pool.num_usable_blocks

    @property
    def num_free_blocks(self) -> int:
        """Without those that are reserved."""
        return self._pool.num_free_blocks - self._num_reserved

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that a prompt can hit, in use or free."""
        return self._pool.num_cached_blocks

    @property
    def max_num_tokens(self) -> int:
        """The most tokens of one request that the whole cache holds."""
        return self._max_num_tokens

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether one request of so many tokens fits into the empty cache."""
        return self.blocks_needed(num_tokens) <= self.num_usable_blocks

    # Waiting requests.

    def no_prefix(self) -> CachedPrefix:
        """A miss: the request computes all of its tokens."""
        return self._index.no_prefix()

    def find_cached_prefix(self, request: CacheUser) -> CachedPrefix:
        """The longest prefix that every group has. Adds no reference: valid until the next allocation."""
        if not self.enable_prefix_caching:
            return self.no_prefix()
        return self._index.find(request, before_lookup=self.allocate_reserved)  # which may evict blocks of the prefix

    def blocks_to_start(self, num_tokens: int, prefix: CachedPrefix) -> int:
        """How many free blocks a request of `num_tokens` tokens may need: those after `prefix`, and unreferenced blocks
        of `prefix`, which count as free.
        """
        in_prefix = prefix.held_block_ids()
        return self.blocks_needed(num_tokens) - len(in_prefix) + self._pool.num_unreferenced(in_prefix)

    # Rows.

    def reserve(self, row: int, request: CacheUser, num_tokens: int, num_tokens_now: int, prefix: CachedPrefix) -> bool:
        """Starts an unused row with `prefix`, found just before. False, and nothing changed, unless blocks for
        `num_tokens` tokens are free. `allocate_reserved` gives it blocks, before anything else is done with a row.

        With full attention the row gets slots for all these at once; with local attention for `num_tokens_now`, where
        its first step ends. The full blocks of known tokens that it will compute are awaited from now on.
        """
        assert row not in self._users, f"row {row} is in use"
        num_new, num_free = self.blocks_needed(num_tokens), self._pool.num_free_blocks - self._num_reserved
        if prefix.num_cached_tokens:
            in_prefix = prefix.held_block_ids()
            num_new -= len(in_prefix)
            if num_new + self._pool.num_unreferenced(in_prefix) > num_free:
                return False
            self._pool.touch(in_prefix)  # before the allocation of others, which could evict them
        elif num_new > num_free:
            return False
        if self._window_groups:  # they allocate the rest later
            parts = zip(self._groups, prefix.block_ids, strict=True)
            num_new = sum(int(group.num_new_at_start(num_tokens, num_tokens_now, len(ids))) for group, ids in parts)
        self._reserved.append((row, prefix, num_tokens, num_tokens_now))
        self._num_reserved += num_new
        self._users[row] = request
        if self.enable_prefix_caching:
            self._index.start(row, request, prefix)
        return True

    def allocate_reserved(self) -> None:
        """Allocates the blocks of all rows that were reserved."""
        if not self._reserved:
            return
        started, prefixes, *num_tokens = zip(*self._reserved, strict=True)
        self._reserved, self._num_reserved = [], 0
        rows, (in_all, now) = np.array(started), np.array(num_tokens)
        for group in self._groups:
            group.start(rows, [prefix.block_ids[group.index] for prefix in prefixes], in_all, now)
        self._num_cached[rows] = [prefix.num_cached_tokens for prefix in prefixes]
        self.capacity[rows], self._next_publish[rows] = self._slots(rows), self._publish_at(rows)
        self._next_release[rows] = self._release_at(rows)

    def block_ids(self, row: int) -> list[np.ndarray]:
        """By group the row's block table, [num_blocks] int32, 0 before the sliding window. A copy."""
        return self.block_ids_of(np.array([row]))[0]

    def block_ids_of(self, rows: np.ndarray) -> list[list[np.ndarray]]:
        """`block_ids` of these rows [n]."""
        by_group = [group.tables(rows) for group in self._groups]
        return list(map(list, zip(*by_group, strict=True)))

    def num_unshared_blocks(self, row: int, prefix: CachedPrefix | None = None) -> int:
        """The blocks that `free` would make free: those with no other reference, and not in `prefix`."""
        ids = self._live_blocks(row)
        if prefix is not None:
            ids = ids[~np.isin(ids, prefix.held_block_ids())]
        return int(np.count_nonzero(self._pool.ref_counts[ids] == 1))

    def blocks_missing(self, rows: np.ndarray, num_tokens: np.ndarray) -> int:
        """The blocks to allocate so that each row has slots for num_tokens[i] tokens."""
        return sum(int(group.num_missing(rows, num_tokens).sum()) for group in self._groups)

    def extend(self, rows: np.ndarray, num_tokens: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Gives each row slots for num_tokens[i] tokens; the blocks for that must be free (`blocks_missing`).

        By group: the rows, repeated for several blocks, and the blocks appended to their tables, both [n] int32.
        """
        taken = [group.extend(rows, num_tokens) for group in self._groups]
        self.capacity[rows] = self._slots(rows)
        return taken

    def extend_by_one(self, rows: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """`extend` by one token for rows [n] int64 without a slot for it; fast path, as almost every step has some."""
        if len(self._groups) > 1:  # then some groups may have the slot
            return self.extend(rows, self.capacity[rows] + 1)
        block_ids = self._groups[0].extend_by_one(rows)
        self.capacity[rows] += self._block_size
        return [(rows.astype(np.int32), block_ids)]

    def publish(self, rows: np.ndarray, token_ids: np.ndarray, num_confirmed: np.ndarray) -> None:
        """Puts the rows' full blocks up to num_confirmed[i] tokens, generated ones too, into the prefix cache.

        token_ids: [max_num_seqs, max_model_len] int32, by row. Tokens are confirmed once their step's output has
        arrived: their slots are written, and no step in flight writes to them again.
        """
        if not self.enable_prefix_caching:
            return
        due = (num_confirmed >= self._next_publish[rows]).nonzero()[0]
        if not len(due):
            return
        rows, num_confirmed = rows[due], num_confirmed[due]
        self._index.publish(rows, token_ids, num_confirmed, [self._users[row] for row in rows.tolist()])
        self._next_publish[rows] = self._publish_at(rows)

    def release_window(self, rows: np.ndarray, num_confirmed: np.ndarray) -> bool:
        """Frees the blocks that no token from position num_confirmed[i] on attends to; whether there were any.

        The caller has published their confirmed tokens.
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

    def free_rows(self, rows: np.ndarray) -> None:
        """Frees every block of these rows, [n] int64, the last one of each first. Published ones stay in the prefix
        cache until evicted; the caller has published what is confirmed.
        """
        for row in rows.tolist():
            del self._users[row]
        if len(self._groups) == 1:
            self._pool.free(self._groups[0].live_blocks_from_the_end(rows))
        else:
            self._pool.free(np.concatenate([self._live_blocks(row)[::-1] for row in rows.tolist()]))
        self._index.stop(rows)
        for group in self._groups:
            group.clear(rows)
        self.capacity[rows] = 0

    def _live_blocks(self, row: int) -> np.ndarray:
        """The blocks that the row holds, over all groups in the order of the tokens. [n] int64."""
        if len(self._groups) == 1:
            return self._groups[0].live_blocks(row)
        ids = [group.live_blocks(row) for group in self._groups]
        ends = [
            (group.num_null_blocks[row] + np.arange(1, len(own) + 1)) * group.block_size
            for group, own in zip(self._groups, ids, strict=True)
        ]
        return np.concatenate(ids)[np.argsort(np.concatenate(ends), kind="stable")]

    def reset_prefix_cache(self) -> bool:
        """Evicts every cached prefix, and saves none; False, and nothing done, while a row is in use."""
        return not self._users and self._pool.reset_prefix_cache(self.stored.num_held_blocks if self.stored else 0)

    # Columns by row, and the invariants.

    def _slots(self, rows: np.ndarray) -> np.ndarray:
        return _least([group.num_blocks[rows] * group.block_size for group in self._groups])

    def _publish_at(self, rows: np.ndarray) -> np.ndarray:
        return _least([(group.num_published[rows] + 1) * group.block_size for group in self._groups])

    def _release_at(self, rows: np.ndarray) -> np.ndarray:
        if not self._window_groups:
            return np.zeros(len(rows), np.int64)
        return _least([group.release_at(rows) for group in self._window_groups])

    def check(self, num_computed: Mapping[int, int], num_confirmed: Mapping[int, int]) -> None:
        """Recomputes every derived count from the tables. By row in use: scheduled tokens, and confirmed ones."""
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
        if self.stored is not None:
            users.update(self.stored.held_blocks())
            self.stored.store.check()
        self._pool.check(users)
        rows = np.array([*self._users], np.int64)
        assert (self.capacity[rows] == self._slots(rows)).all(), "capacity disagrees with the tables"
        assert not np.delete(self.capacity, rows).any(), "a row that is not in use has slots"
        assert (self._next_publish[rows] == self._publish_at(rows)).all(), "next_publish disagrees with the tables"
        assert (self._next_release[rows] == self._release_at(rows)).all(), "next_release disagrees with the tables"
        self._index.check(dict(zip(rows.tolist(), self._publish_at(rows).tolist(), strict=True)))


def _least(columns: list[np.ndarray]) -> np.ndarray:
    """The minimum of each row."""
    least: np.ndarray = reduce(np.minimum, columns)
    return least
