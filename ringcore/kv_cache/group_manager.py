"""The block tables of one KV cache group. What differs between kinds of attention is in `attention_kinds`.

A row's block table where no token sees the first two blocks any more (0 is the null block):

    block   0  1  2  3  4  5  ...
    table   0  0  7  3  9  0
            ╰──╯           ╰─ num_blocks = 5
            num_null_blocks = 2
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Sequence
from itertools import chain, compress
from typing import ClassVar, Protocol

import numpy as np

from ringcore.kv_cache.block_pool import BlockPool
from ringcore.kv_cache.cache_user import CacheUser
from ringcore.kv_cache.spec import KVCacheSpec
from ringcore.kv_cache.unhashed_blocks import UnhashedBlocks

__all__ = ["CachedBlocks", "GroupManager", "cells_of_rows"]


_ONE = np.array(1)  # numpy takes as long to convert a Python number as to add it


class CachedBlocks(Protocol):
    """Where a prefix is looked up: the `BlockPool`, or all that can be had."""

    def lookup(self, group: int, hashes: Sequence[bytes]) -> np.ndarray:
        """The blocks of the first hashes, up to the first miss. [n] int64."""
        ...

    def hashes(self, group: int) -> Container[bytes]: ...


class GroupManager(ABC):
    """One group's block tables by row, over a pool that all groups share. `rows` are [n] integers, each row once.

    A request has a hash every `hash_block_size` tokens; the key of a block is the hash at its end.
    A prefix is a multiple of `alignment` tokens, the same for all groups.
    """

    def __init__(
        self,
        spec: KVCacheSpec,
        index: int,
        pool: BlockPool,
        *,
        hash_block_size: int,
        alignment: int,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        self.block_size = block_size = spec.block_size
        self._spec = spec
        self.index = index
        self.alignment = alignment
        self.num_blocks = np.zeros(max_num_seqs, np.int64)  # by row: entries of its table, null blocks included
        self.num_null_blocks = np.zeros(max_num_seqs, np.int64)  # by row: leading entries that are 0
        self.num_published = np.zeros(max_num_seqs, np.int64)  # by row: leading blocks put into the prefix cache
        self._pool = pool
        self.unhashed: UnhashedBlocks | None = None  # then `publish` gives blocks no hash before it is needed
        self._hashes_per_block = block_size // hash_block_size
        self._tables = np.zeros((max_num_seqs, -(-max_model_len // block_size)), np.int32)
        self._token_ids = np.zeros((len(pool.ref_counts), block_size), np.int32)  # by block id: tokens of cached ones
        # The same with a block as one element: numpy copies elements much faster than short rows.
        self._block_dtype = np.dtype((np.void, self._token_ids.itemsize * block_size))
        self._blocks = self._token_ids.view(self._block_dtype)[:, 0]

    # What differs between kinds of attention.

    has_all_slots_at_start: ClassVar[bool]  # whether a row starts with slots for all known tokens, or its first step's

    @abstractmethod
    def num_skipped_blocks(self, num_computed_tokens: int) -> int:
        """Leading blocks that no token from position `num_computed_tokens` on attends to."""

    @abstractmethod
    def find(self, hashes: list[bytes], num_tokens: int, limit: int, cached: CachedBlocks) -> np.ndarray:
        """The longest prefix cache hit: its blocks, with 0, the null block, for those that the request does not need.

        hashes: the request's. num_tokens: all that it has. limit: the most tokens of the prefix, a multiple of the
        alignment. It may end with any block: `shorten` makes it a multiple of the alignment.
        """

    @abstractmethod
    def shorten(
        self, ids: np.ndarray, hashes: list[bytes], num_tokens: int, limit: int, cached: CachedBlocks
    ) -> np.ndarray:
        """`find` for a smaller limit, given its result `ids` for a larger one."""

    # Block tables.

    def tables(self, rows: np.ndarray) -> list[np.ndarray]:
        """The block table of each row: [num_blocks] int32, 0 before the sliding window. Copies."""
        counts = self.num_blocks[rows].tolist()
        tables = self._tables[rows, : max(counts)]
        return [table[:count] for table, count in zip(tables, counts, strict=True)]

    def live_blocks(self, row: int) -> np.ndarray:
        """The blocks that the row holds, in order, without null blocks. [n] int64."""
        return self._tables[row, self.num_null_blocks[row] : self.num_blocks[row]].astype(np.int64)

    def live_blocks_from_the_end(self, rows: np.ndarray) -> np.ndarray:
        """The blocks of all these rows, row by row, each row's last one first. [n] int64."""
        tables = self._tables[rows, : int(self.num_blocks[rows].max())][:, ::-1]
        live: np.ndarray = tables[tables != 0].astype(np.int64)
        return live

    def num_new_at_start(
        self, num_tokens: np.ndarray | int, num_tokens_now: np.ndarray | int, num_cached: np.ndarray | int
    ) -> np.ndarray:
        """Blocks to allocate when a row starts after `num_cached` ones of a prefix, with num_tokens known and its first
        step ending at num_tokens_now. Of one row, or of several, [n] each."""
        num_slots = num_tokens if self.has_all_slots_at_start else num_tokens_now
        num_new: np.ndarray = np.maximum(-(-num_slots // self.block_size) - num_cached, 0)
        return num_new

    def start(
        self, rows: np.ndarray, prefix_ids: Sequence[list[int]], num_tokens: np.ndarray, num_tokens_now: np.ndarray
    ) -> None:
        """Fills the tables of unused rows: prefix blocks, which the caller has touched, then new ones, as many as
        `num_new_at_start`."""
        num_cached = np.fromiter(map(len, prefix_ids), np.int64, len(prefix_ids))
        num_new = self.num_new_at_start(num_tokens, num_tokens_now, num_cached)
        for row, ids in zip(rows.tolist(), prefix_ids, strict=True):
            if ids:
                self._tables[row, : len(ids)] = ids
                self.num_null_blocks[row] = ids.count(0)
        at_rows, at_blocks = cells_of_rows(rows, num_cached, num_new)
        self._tables[at_rows, at_blocks] = self._pool.allocate(len(at_rows))
        self.num_blocks[rows] = num_cached + num_new
        self.num_published[rows] = num_cached

    def num_missing(self, rows: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
        """Blocks to allocate so that each row has slots for num_tokens[i] tokens. [n] int64."""
        num_blocks = (num_tokens + (self.block_size - 1)) // self.block_size
        num_missing: np.ndarray = np.maximum(num_blocks - self.num_blocks[rows], 0)
        return num_missing

    def extend(self, rows: np.ndarray, num_tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Allocates the missing blocks. The rows, repeated for several blocks, and the blocks, both [n] int32."""
        first, num_missing = self.num_blocks[rows], self.num_missing(rows, num_tokens)
        at_rows, at_blocks = cells_of_rows(rows, first, num_missing)
        ids = self._pool.allocate(len(at_rows))
        self._tables[at_rows, at_blocks] = ids
        self.num_blocks[rows] = first + num_missing
        return at_rows.astype(np.int32), ids.astype(np.int32)

    def extend_by_one(self, rows: np.ndarray) -> np.ndarray:
        """One more block for each row. [n] int32."""
        ids, num_blocks = self._pool.allocate(len(rows)), self.num_blocks[rows]
        self._tables[rows, num_blocks] = ids
        self.num_blocks[rows] = num_blocks + _ONE
        return ids.astype(np.int32)

    def clear(self, rows: np.ndarray) -> None:
        """Clears the rows, whose blocks the caller frees."""
        self._tables[rows, : int(self.num_blocks[rows].max())] = 0
        self.num_blocks[rows] = self.num_null_blocks[rows] = self.num_published[rows] = 0

    # The prefix cache.

    def publish(
        self, rows: np.ndarray, token_ids: np.ndarray, num_confirmed: np.ndarray, users: Sequence[CacheUser]
    ) -> None:
        """Puts the rows' full blocks up to num_confirmed[i] tokens into the prefix cache. Unless there is `unhashed`,
        the users have the hashes of these."""
        size = self.block_size
        first = self.num_published[rows]
        end = np.maximum(num_confirmed // size, first)
        at_rows, at_blocks = cells_of_rows(rows, first, end - first)
        if not len(at_rows):
            return
        ids = self._tables[at_rows, at_blocks].astype(np.int64)
        is_held = ids != 0  # the others were released by the sliding window before they were published
        if not is_held.all():
            at_rows, at_blocks, ids = at_rows[is_held], at_blocks[is_held], ids[is_held]
        # Also written for a duplicate block, where no lookup reads them.
        self._blocks[ids] = self._blocks_of(token_ids)[at_rows, at_blocks]
        spans = list(zip(rows.tolist(), first.tolist(), end.tolist(), users, strict=True))
        if self.unhashed is not None:
            self.unhashed.publish(spans, token_ids, ids)
        else:
            names = chain.from_iterable(self._block_hashes(user.block_hashes, a, b) for _, a, b, user in spans)
            self._pool.cache(self.index, ids, [*compress(names, is_held)])
        self.num_published[rows] = end

    def tokens_of(self, ids: np.ndarray) -> np.ndarray:
        """The tokens of cached blocks: [n, block_size] int32."""
        tokens: np.ndarray = self._token_ids[ids]
        return tokens

    def _blocks_of(self, token_ids: np.ndarray) -> np.ndarray:
        """token_ids [num_rows, num_tokens] as [num_rows, num_blocks] elements as in `_blocks`, without a copy: whole
        blocks only."""
        num_tokens = token_ids.shape[1] // self.block_size * self.block_size
        return token_ids[:, :num_tokens].view(self._block_dtype)

    def adopt(self, ids: np.ndarray, hashes: Sequence[bytes], token_ids: np.ndarray) -> None:
        """Puts blocks in use, whose contents came from elsewhere, into the prefix cache. token_ids: [n, block_size]."""
        self._pool.cache(self.index, ids, hashes)
        self._token_ids[ids] = token_ids

    def hashes_at(self, hashes: list[bytes], blocks: np.ndarray) -> list[bytes]:
        """Of a request's hashes those of its blocks with these numbers, [n]."""
        return [hashes[(block + 1) * self._hashes_per_block - 1] for block in blocks.tolist()]

    def tokens_at(self, token_ids: np.ndarray, blocks: np.ndarray) -> np.ndarray:
        """The tokens of its full blocks with these numbers: [n, block_size] int32, a copy."""
        num_blocks = len(token_ids) // self.block_size
        found: np.ndarray = token_ids[: num_blocks * self.block_size].reshape(-1, self.block_size)[blocks]
        return found

    def num_confirmed_tokens(self, ids: np.ndarray, token_ids: np.ndarray) -> int:
        """How many leading tokens, in whole blocks, equal those cached in `ids`: guards against hash collisions."""
        first, size = len(ids) - int(np.count_nonzero(ids)), self.block_size
        expected = token_ids[first * size : len(ids) * size].reshape(-1, size)
        is_same = self._token_ids.take(ids[first:], axis=0) == expected
        num_same = len(is_same) if is_same.all() else int(is_same.all(axis=1).argmin())
        return (first + num_same) * size

    def _block_hashes(self, hashes: list[bytes], first: int, end: int) -> list[bytes]:
        """The hashes of the blocks from number `first` to `end`."""
        step = self._hashes_per_block
        return hashes[(first + 1) * step - 1 : end * step : step]

    # The check.

    def check_row(
        self, row: int, hashes: list[bytes], num_confirmed: int, num_known: int, max_tokens_in_flight: int
    ) -> None:
        """num_known: tokens whose slots hold. They may be one more than the confirmed ones: see `CachedPrefix`."""
        num_blocks, num_null_blocks = int(self.num_blocks[row]), int(self.num_null_blocks[row])
        num_published = int(self.num_published[row])
        table = self._tables[row].tolist()
        assert not any(table[:num_null_blocks]), f"row {row}: a block before its sliding window"
        assert all(table[num_null_blocks:num_blocks]), f"row {row}: the null block among those that it holds"
        assert not any(table[num_blocks:]), f"row {row}: a block after its last one"
        assert num_null_blocks <= self.num_skipped_blocks(num_confirmed), f"row {row}: a needed block was released"
        most = self._spec.blocks_needed(num_blocks * self.block_size, max_tokens_in_flight)
        assert num_blocks - num_null_blocks <= most, f"row {row}: more than the {most} blocks that it was admitted for"
        assert num_published * self.block_size <= num_known, f"row {row}: published before it is confirmed"
        found_by = list(map(self._pool.hash_of, table[:num_blocks]))
        for own, name in zip(found_by, self._block_hashes(hashes, 0, num_published), strict=False):
            assert own in (None, name), f"row {row}: a block is cached by a wrong hash"
        assert not any(found_by[num_published:]), f"row {row}: a block is cached before it is published"


def cells_of_rows(rows: np.ndarray, first: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Table cells, counts[i] of them from first[i] on in rows[i]: their rows and columns."""
    if counts.tolist().count(1) == len(counts):  # the common case: each row gets one block
        return rows, first
    ends = counts.cumsum()
    columns = (first - ends + counts).repeat(counts)
    return rows.repeat(counts), columns + np.arange(len(columns))
