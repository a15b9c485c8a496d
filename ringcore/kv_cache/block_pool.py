"""The block allocator of the KV cache: free blocks, reference counts, and the prefix cache with LRU eviction.

A block is in one of three states:

    state         ref_count  hash  where
    in use        >= 1       any   in block tables                  holds tokens of running requests
    cached, free  0          set   in LRU order                     evictable; a prompt with this prefix can hit it
    empty, free   0          none  on the stack                     holds nothing

Empty blocks are allocated first, the last freed one first (its memory is warm); then cached ones are evicted, the least
recently used first. So a prefix is evicted only when no empty block is left, its last block first. Blocks are ints; no
Python object exists for a block that is not cached, nor for one that is cached without its hash (`unhashed_blocks`):
such a block has a stamp, a number of its own, until it gets its hash or is evicted.
"""

from __future__ import annotations

from collections.abc import Callable, KeysView, Mapping, Sequence
from itertools import compress, repeat
from operator import eq

import numpy as np

from ringcore.kv_cache.eviction_queue import EvictionQueue

__all__ = ["BlockPool"]

_NOT_CACHED = -1
_FIRST_LOOKUP, _LOOKUP_GROWTH = 64, 4  # hashes at a time: a miss costs little, however long the prompt
_NO_IDS = np.empty(0, np.int64)


class BlockPool:
    """All blocks, by id, for `num_groups` KV cache groups. Block 0 is the null block: it pads block tables and is never
    allocated.
    """

    def __init__(self, num_blocks: int, num_groups: int = 1) -> None:
        assert num_blocks >= 2, "a pool has the null block and at least one more"
        self.ref_counts = np.zeros(num_blocks, np.int32)  # by block id: the block tables that hold it
        self._group_of = np.full(num_blocks, _NOT_CACHED, np.int16)  # the group that it is cached for
        self._stack = np.empty(num_blocks, np.int64)  # free list: `_num_empty` empty blocks, the last first
        self._cached: list[dict[bytes, int]] = [{} for _ in range(num_groups)]  # by group: hash -> block id
        self._hash_of: dict[int, bytes] = {}  # of cached blocks
        self._evictable = EvictionQueue(num_blocks)  # cached and free
        # Called with the groups, hashes and ids of blocks about to be evicted; their contents hold until the next step.
        self.on_eviction: Callable[[list[int], list[bytes], list[int]], None] | None = None
        # Called with the hashes of evicted blocks.
        self.on_forgotten: Callable[[list[bytes]], None] | None = None
        self.stamps = np.full(num_blocks, -1, np.int64)  # by block id; -1: it is not cached, or has its hash
        self._num_stamped = self._num_stamps = 0  # now, and ever
        self._num_empty = 0
        self._empty_unused()

    def _empty_unused(self) -> None:
        unused = np.flatnonzero(self.ref_counts[1:] == 0)[::-1] + 1
        self._num_empty = len(unused)
        self._stack[: self._num_empty] = unused

    @property
    def num_usable_blocks(self) -> int:
        return len(self.ref_counts) - 1

    @property
    def num_free_blocks(self) -> int:
        return self._num_empty + self._evictable.num

    @property
    def num_cached_blocks(self) -> int:
        return len(self._hash_of) + self._num_stamped

    @property
    def is_cached(self) -> np.ndarray:
        """By block id, whether a prompt can hit it. [num_blocks] bool, a copy."""
        is_cached: np.ndarray = self._group_of != _NOT_CACHED
        return is_cached

    def allocate(self, num_blocks: int) -> np.ndarray:
        """`num_blocks` blocks with one reference each; at most `num_free_blocks`. [num_blocks] int64.

        Evicts cached blocks as needed.
        """
        assert num_blocks <= self.num_free_blocks, "allocate: not so many blocks are free"
        bottom = max(self._num_empty - num_blocks, 0)
        ids = self._stack[bottom : self._num_empty][::-1].copy()
        self._num_empty = bottom
        if len(ids) < num_blocks:
            ids = np.concatenate((ids, self._evict(num_blocks - len(ids))))
        self.ref_counts[ids] = 1
        return ids

    def _evict(self, num_blocks: int) -> np.ndarray:
        """Evicts the least recently used cached blocks: no lookup hits them any more."""
        evicted = hashed = self._evictable.pop(num_blocks)
        if self._num_stamped:
            has_stamp = self.stamps[evicted] >= 0
            hashed = evicted[~has_stamp]
            self.stamps[evicted] = -1
            self._num_stamped -= len(evicted) - len(hashed)
        ids, groups = hashed.tolist(), self._group_of[hashed].tolist()
        hashes = list(map(self._hash_of.pop, ids))
        if self.on_eviction is not None:
            self.on_eviction(groups, hashes, ids)
        if self.on_forgotten is not None:
            self.on_forgotten(hashes)
        for group, block_hash in zip(groups, hashes, strict=True):
            del self._cached[group][block_hash]
        self._group_of[evicted] = _NOT_CACHED
        return evicted

    def free(self, ids: np.ndarray) -> None:
        """Drops one reference to each, in this order: of the empty blocks the last is allocated first, of the cached
        ones the first is evicted first. A block may occur as often as it has references. ids: [n] int64.
        """
        if not len(ids):
            return
        counts = self.ref_counts[ids]
        if _all(counts == 1):
            self.ref_counts[ids] = 0
        else:
            assert _all(counts), "a block is freed once too often"
            np.subtract.at(self.ref_counts, ids, 1)
            ids = ids[self.ref_counts[ids] == 0]
        groups = self._group_of[ids]
        is_cached = groups != _NOT_CACHED
        cached = ids[is_cached]
        if len(cached):
            # A block freed twice here, by two tables, is queued once, by the last. Empty blocks are never shared.
            self._evictable.add(cached)
            ids = ids[~is_cached]
        self._push(ids)

    def _push(self, ids: np.ndarray) -> None:
        """Adds empty blocks."""
        self._stack[self._num_empty : self._num_empty + len(ids)] = ids
        self._num_empty += len(ids)

    def num_unreferenced(self, ids: np.ndarray) -> int:
        """How many of these are in no block table: `touch` removes them from the free blocks."""
        return len(ids) - int(np.count_nonzero(self.ref_counts[ids]))

    def touch(self, ids: np.ndarray) -> None:
        """Adds one reference to each, on a prefix cache hit. Free ones become used. ids: [n] int64, unique."""
        unreferenced = ids[self.ref_counts[ids] == 0]
        self._evictable.remove(unreferenced)
        self.ref_counts[ids] += 1

    def cache(self, group: int, ids: np.ndarray, hashes: Sequence[bytes]) -> None:
        """Puts blocks in use into the prefix cache, ids[i] by hashes[i]. If another block of the group has the hash
        already, that one stays cached. ids: [n] int64.
        """
        own_ids = ids.tolist()
        found_ids = list(map(self._cached[group].setdefault, hashes, own_ids))
        if found_ids != own_ids:
            is_new = list(map(eq, found_ids, own_ids))
            ids, own_ids, hashes = ids[is_new], list(compress(own_ids, is_new)), list(compress(hashes, is_new))
        assert _all(self.ref_counts[ids]), "a free block cannot be cached"
        assert _all(self._group_of[ids] == _NOT_CACHED), "a block is cached already"
        self._hash_of.update(zip(own_ids, hashes, strict=True))
        self._group_of[ids] = group

    def stamp(self, ids: np.ndarray) -> np.ndarray:
        """Caches blocks in use for the one group, without hashes; their stamps. ids, stamps: [n] int64."""
        assert len(self._cached) == 1, "only a cache of one group has blocks without hashes"
        assert _all(self.ref_counts[ids]), "a free block cannot be cached"
        assert _all(self._group_of[ids] == _NOT_CACHED), "a block is cached already"
        stamps = np.arange(self._num_stamps, self._num_stamps + len(ids))
        self._num_stamps += len(ids)
        self._num_stamped += len(ids)
        self.stamps[ids], self._group_of[ids] = stamps, 0
        return stamps

    def name(self, ids: np.ndarray, hashes: Sequence[bytes]) -> list[bool]:
        """Gives blocks with stamps their hashes. One whose hash another block has is cached no more: False of it.
        ids: [n] int64."""
        own_ids = ids.tolist()
        are_new = list(map(eq, map(self._cached[0].setdefault, hashes, own_ids), own_ids))
        self._hash_of.update(compress(zip(own_ids, hashes, strict=True), are_new))
        self.stamps[ids] = -1
        self._num_stamped -= len(ids)
        if not all(are_new):
            others = ids[np.logical_not(are_new)]
            self._group_of[others] = _NOT_CACHED
            empty = others[self.ref_counts[others] == 0]
            self._evictable.remove(empty)
            self._push(empty)
        return are_new

    def lookup(self, group: int, hashes: Sequence[bytes]) -> np.ndarray:
        """The cached blocks of the first hashes, up to the first miss. [n] int64."""
        parts = [_NO_IDS]
        begin, size = 0, _FIRST_LOOKUP
        while begin < len(hashes):
            names = hashes[begin : begin + size]
            ids = np.fromiter(map(self._cached[group].get, names, repeat(0)), np.int64, len(names))
            parts.append(ids)
            if not _all(ids):
                parts[-1] = ids[: ids.argmin()]  # the first 0: no block has that id
                break
            begin, size = begin + size, size * _LOOKUP_GROWTH
        return parts[1] if len(parts) == 2 else np.concatenate(parts)

    def hashes(self, group: int) -> KeysView[bytes]:
        """The hashes of the group's cached blocks."""
        return self._cached[group].keys()

    def block_of(self, group: int, block_hash: bytes) -> int:
        """The group's cached block of this hash; 0 if there is none."""
        return self._cached[group].get(block_hash, 0)

    def hash_of(self, block_id: int) -> bytes | None:
        """The block's hash; None if it is not cached."""
        return self._hash_of.get(block_id)

    def reset_prefix_cache(self, num_held: int = 0) -> bool:
        """Evicts every cached block; False, and nothing done, while more blocks than `num_held` are in use, which
        stay so. `on_eviction` is not called.
        """
        if self.num_free_blocks + num_held != self.num_usable_blocks:
            return False
        if self.on_forgotten is not None:
            self.on_forgotten(list(self._hash_of.values()))
        for cached in self._cached:
            cached.clear()
        self._hash_of.clear()
        self.stamps[:] = -1
        self._num_stamped = 0
        self._evictable.clear()
        self._group_of[:] = _NOT_CACHED
        self._empty_unused()
        return True

    def check(self, ref_counts: Mapping[int, int]) -> None:
        """Recomputes every derived count. `ref_counts`: how many block tables hold each block id."""
        empty, evictable = self._stack[: self._num_empty].tolist(), self._evictable.first(self._evictable.num).tolist()
        free = {*empty, *evictable}
        assert len(free) == len(empty) + len(evictable), "a block is free twice"
        assert 0 not in free | ref_counts.keys(), "the null block is allocated"
        expected = np.zeros_like(self.ref_counts)
        expected[list(ref_counts)] = list(ref_counts.values())
        wrong = np.flatnonzero(expected != self.ref_counts).tolist()
        assert not wrong, f"blocks {wrong[:8]}: {expected[wrong[:8]]} users, counted {self.ref_counts[wrong[:8]]}"
        assert free == set(np.flatnonzero(self.ref_counts[1:] == 0) + 1), "free blocks and reference counts disagree"
        groups = dict(zip(self._hash_of, self._group_of[list(self._hash_of)].tolist(), strict=True))
        stamped = np.flatnonzero(self.stamps >= 0).tolist()
        assert len(stamped) == self._num_stamped, "stamps and their count disagree"
        assert not groups.keys() & set(stamped), "a block has a stamp and a hash"
        known = groups.keys() | set(stamped)
        assert np.flatnonzero(self._group_of != _NOT_CACHED).tolist() == sorted(known), "a group, and no hash or stamp"
        self._evictable.check()
        assert free & known == set(evictable), "a cached block is listed as empty"
        cached = [{} for _ in self._cached]  # type: list[dict[bytes, int]]
        for block_id, group in groups.items():
            cached[group][self._hash_of[block_id]] = block_id
        assert cached == self._cached, "prefix cache: the maps and the blocks disagree"


def _all(values: np.ndarray) -> bool:
    """As `values.all()`, in a third of the time for a few values."""
    return int(np.count_nonzero(values)) == values.size
