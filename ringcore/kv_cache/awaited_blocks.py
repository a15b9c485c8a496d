"""Prefix blocks that running requests are computing: a waiting request with the same prefix waits for the cache hit.

A row is found by the hash of its first awaited block, on which all later ones depend. Later blocks are hashed when a
request has that block, too: requests that share nothing are hashed no further. A row that has computed its blocks is
found until it stops, and awaited no more: to note what a step has computed is one store for all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from ringcore.kv_cache.cache_user import CacheUser

__all__ = ["AwaitedBlocks"]

_Awaited: TypeAlias = tuple[bytes, CacheUser, int]  # the hash of its first block when it started; up to which block


class AwaitedBlocks:
    """By row the full blocks that it is computing. Several rows may be computing the same block.

    name_of: the hash of a block of a request, by its number.
    """

    def __init__(self, max_num_seqs: int, name_of: Callable[[CacheUser, int], bytes]) -> None:
        self._name_of = name_of
        self._num_done = np.zeros(max_num_seqs, np.int64)  # by row: leading blocks that are computed
        self._by_row: dict[int, _Awaited] = {}
        self._rows: dict[bytes, list[int]] = {}  # by the hash of their first blocks

    def add(self, row: int, request: CacheUser, first: int, end: int) -> None:
        """The row, new here, will compute its blocks from number `first` to `end`."""
        assert row not in self._by_row
        if first < end:
            name = self._name_of(request, first)
            self._by_row[row] = name, request, end
            self._rows.setdefault(name, []).append(row)
            self._num_done[row] = first

    def has(self, names: Sequence[bytes]) -> bool:
        """Whether a row is computing the last of a request's first blocks, whose hashes are `names`."""
        if self._rows.keys().isdisjoint(names):
            return False
        same_start = [row for name in names for row in self._rows.get(name, ())]
        return any(self._is_computing(row, len(names) - 1, names[-1]) for row in same_start)

    def _is_computing(self, row: int, block: int, name: bytes) -> bool:
        _, request, end = self._by_row[row]
        return bool(self._num_done[row] <= block < end) and self._name_of(request, block) == name

    def drop_first(self, rows: np.ndarray, num_blocks: np.ndarray) -> None:
        """Of rows[i] [n] the first num_blocks[i] blocks are computed; never fewer than before."""
        self._num_done[rows] = num_blocks

    def drop(self, rows: np.ndarray) -> None:
        """Removes rows [n]: they will compute no more blocks."""
        for row in rows.tolist():
            awaited = self._by_row.pop(row, None)
            if awaited is None:
                continue
            same_start = self._rows[awaited[0]]
            same_start.remove(row)
            if not same_start:
                del self._rows[awaited[0]]

    def check(self, num_computed_blocks: dict[int, int]) -> None:
        """Recomputes the rows. By row in use: the blocks that are computed and published."""
        found = sorted(row for rows in self._rows.values() for row in rows)
        assert found == sorted(self._by_row), "awaited blocks: the rows and their first hashes disagree"
        for row, (first, *_) in self._by_row.items():
            assert row in self._rows[first], f"row {row} has another first block"
            assert row in num_computed_blocks, f"row {row} is not in use, and awaited"
            assert num_computed_blocks[row] <= self._num_done[row], f"row {row}: a computed block is awaited"
