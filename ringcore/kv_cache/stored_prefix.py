"""Prefixes that a store holds: finds them beyond what the device has cached, and brings them into the prefix cache.

A load takes blocks of the pool and keeps references to them and to the cached blocks before them, so that nothing
evicts these meanwhile. When it has ended its blocks are published and freed: they are cached like any other, the most
recently used ones.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ringcore.kv_cache.block_pool import BlockPool
from ringcore.kv_cache.block_store import BlockStore, block_name
from ringcore.kv_cache.cached_prefix import CachedPrefix, find_by_hash
from ringcore.kv_cache.group_manager import GroupManager

__all__ = ["StoredPrefixes"]

_STORED = -1  # in place of a block id


class _Part(NamedTuple):
    """A load's blocks of one group."""

    group: GroupManager
    hashes: list[bytes]
    block_ids: np.ndarray  # [n] int64
    token_ids: np.ndarray  # [n, block_size] int32


@dataclass(frozen=True, slots=True)
class _Load:
    names: list[bytes]  # of the blocks of all parts, in their order
    parts: list[_Part]
    held: np.ndarray  # [n] int64: the blocks that it has references to, in the order of their tokens
    num_tokens: int  # by which the prefix becomes longer
    began_s: float


class StoredPrefixes:
    """The loads in flight, by number. Several requests may wait for one.

    Invariant: a load has one reference to each of its `held` blocks.
    """

    def __init__(self, store: BlockStore, pool: BlockPool, groups: Sequence[GroupManager], alignment: int) -> None:
        assert len(groups) < 256, "a name has one byte for the group"
        self.store = store
        self._pool, self._groups, self._alignment = pool, groups, alignment
        pool.on_eviction = self._save
        self._reachable = _Reachable(pool, store)
        self._loads: dict[int, _Load] = {}
        self._num_begun = 0
        self.num_hit_tokens = 0  # of loads in which no block failed
        self.load_s = 0.0  # the seconds that loads took, summed

    def _save(self, groups: list[int], hashes: list[bytes], block_ids: list[int]) -> None:
        self.store.save(list(map(block_name, groups, hashes)), block_ids)

    @property
    def in_flight(self) -> list[int]:
        """The numbers of the loads that have not ended."""
        return list(self._loads)

    @property
    def num_held_blocks(self) -> int:
        """The blocks that loads hold, each counted once."""
        return len(set(self.held_blocks()))

    def begin(
        self, hashes: list[bytes], token_ids: np.ndarray, num_blocks: int, prefix: CachedPrefix, now_s: float
    ) -> int | None:
        """Begins a load of what is stored after `prefix`, a lookup's result; -> its number, or that of a load in flight
        that brings some of it. None if nothing is stored, or if fewer blocks are free than the request may need.

        hashes: of token_ids, [num_tokens] int32, all that the request has. num_blocks: the most that it holds.
        """
        limit = len(token_ids) // self._alignment * self._alignment
        if not len(self.store) or prefix.num_cached_tokens >= limit:
            return None
        found = find_by_hash(self._groups, hashes, len(token_ids), limit, self._alignment, self._reachable)
        num_tokens = len(found[0]) * self._groups[0].block_size - prefix.num_cached_tokens
        if num_tokens <= 0:
            return None
        stored = [np.flatnonzero(ids == _STORED) for ids in found]
        by_group = [group.hashes_at(hashes, at) for group, at in zip(self._groups, stored, strict=True)]
        names = [block_name(index, one) for index, own in enumerate(by_group) for one in own]
        for name in names:
            if (number := self.store.load_of(name)) is not None:
                return number
        cached = np.concatenate([ids[ids > 0] for ids in found])
        if num_blocks - len(cached) + self._pool.num_unreferenced(cached) > self._pool.num_free_blocks:
            return None
        number, self._num_begun = self._num_begun, self._num_begun + 1
        self.store.pin(number, names)  # before the allocation, which may evict blocks into the store
        self._pool.touch(cached)
        block_ids = self._pool.allocate(len(names))
        self.store.load(number, names, block_ids)
        parts, at = [], 0
        for group, own, places, ids in zip(self._groups, by_group, stored, found, strict=True):
            ids[places] = own_ids = block_ids[at : at + len(own)]
            parts.append(_Part(group, own, own_ids, group.tokens_at(token_ids, places)))
            at += len(own)
        self._loads[number] = _Load(names, parts, _in_token_order(self._groups, found), num_tokens, now_s)
        return number

    def finish(self, number: int, is_loaded: Sequence[bool], now_s: float) -> None:
        """The load has ended on every rank; is_loaded: by block, in the order of its names."""
        load = self._loads.pop(number)
        is_current = bool(load.names) and self.store.load_of(load.names[0]) == number  # not cleared meanwhile
        self.store.unpin(number, load.names, is_loaded)
        self.load_s += now_s - load.began_s
        if is_current:
            self.num_hit_tokens += load.num_tokens if all(is_loaded) else 0
            at = 0
            for part in load.parts:
                good = np.array(is_loaded[at : at + len(part.hashes)], bool)
                part.group.adopt(
                    part.block_ids[good],
                    [one for one, is_good in zip(part.hashes, good.tolist(), strict=True) if is_good],
                    part.token_ids[good],
                )
                at += len(part.hashes)
        self._pool.free(load.held[::-1])  # the end of the prefix is evicted first

    def counts(self) -> tuple[int, int, int, int, int, float]:
        """Blocks stored; tokens found; blocks that failed; bytes saved, and loaded; the seconds of loads."""
        store = self.store
        return (
            len(store),
            self.num_hit_tokens,
            store.num_failed_blocks,
            store.saved_bytes,
            store.loaded_bytes,
            self.load_s,
        )

    def held_blocks(self) -> list[int]:
        """The blocks that loads hold, as often as they do."""
        return [block_id for load in self._loads.values() for block_id in load.held.tolist()]


class _Reachable:
    """`CachedBlocks` of the device and of the store: a block that is only stored has the id `_STORED`."""

    def __init__(self, pool: BlockPool, store: BlockStore) -> None:
        self._pool, self._store = pool, store

    def lookup(self, group: int, hashes: Sequence[bytes]) -> np.ndarray:
        ids = []
        for one in hashes:
            block_id = self._pool.block_of(group, one)
            if not block_id and block_name(group, one) not in self._store:
                break
            ids.append(block_id or _STORED)
        return np.array(ids, np.int64)

    def hashes(self, group: int) -> Container[bytes]:
        return _Names(group, self._pool.hashes(group), self._store)


class _Names:
    """The hashes of the group's blocks that are cached or stored."""

    def __init__(self, group: int, cached: Container[bytes], store: BlockStore) -> None:
        self._group, self._cached, self._store = group, cached, store

    def __contains__(self, block_hash: object) -> bool:
        assert isinstance(block_hash, bytes)
        return block_hash in self._cached or block_name(self._group, block_hash) in self._store


def _in_token_order(groups: Sequence[GroupManager], found: Sequence[np.ndarray]) -> np.ndarray:
    """The blocks of all groups, without null blocks, by where their tokens end. [n] int64."""
    ends = [np.arange(1, len(ids) + 1) * group.block_size for group, ids in zip(groups, found, strict=True)]
    ids = np.concatenate(found)
    in_order = ids[np.argsort(np.concatenate(ends), kind="stable")]
    held: np.ndarray = in_order[in_order != 0]
    return held
