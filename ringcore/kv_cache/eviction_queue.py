"""The order in which cached, free blocks are evicted: numpy calls for many blocks at once, and no object for any.

    log     3  7  2  3  9  5  ...      blocks in the order in which they became free
               ╰──────── 7, 2, 3, 9, 5 are queued

The first 3 is stale: the block was used, and became free again after it.
"""

from __future__ import annotations

import numpy as np

__all__ = ["EvictionQueue"]

_FIRST_LOOK = 64  # entries of the log at a time, while it looks for queued ones


class EvictionQueue:
    """Block ids, each at most once, the least recently used first; `num` of them.

    Invariant: an entry of the log from `_begin` to `_end` counts exactly if `_place` has its place for its block.
    """

    def __init__(self, num_blocks: int) -> None:
        self._place = np.full(num_blocks, -1, np.int64)  # by block id: its entry in the log; -1: not queued
        self._log = np.empty(2 * num_blocks, np.int64)
        self._begin = self._end = self.num = 0

    def add(self, ids: np.ndarray) -> None:
        """Appends blocks that are not queued, in this order; of one that occurs several times the last counts.
        ids: [n] int64."""
        if self._end + len(ids) > len(self._log):
            self._compact(len(ids))
        end = self._end + len(ids)
        places = np.arange(self._end, end)
        self._log[self._end : end] = ids
        self._place[ids] = places
        self.num += int(np.count_nonzero(self._place[ids] == places))
        self._end = end

    def remove(self, ids: np.ndarray) -> None:
        """Removes blocks that are queued. ids: [n] int64, unique."""
        self._place[ids] = -1
        self.num -= len(ids)

    def first(self, num: int) -> np.ndarray:
        """The first `num` blocks, which stay. [num] int64."""
        found, begin, size = [np.empty(0, np.int64)], self._begin, max(num, _FIRST_LOOK)
        while num:
            assert begin < self._end, "not so many blocks are queued"
            entries = self._log[begin : min(begin + size, self._end)]
            queued = entries[self._place[entries] == np.arange(begin, begin + len(entries))][:num]
            found.append(queued)
            num -= len(queued)
            begin += size
        return found[1] if len(found) == 2 else np.concatenate(found)

    def pop(self, num: int) -> np.ndarray:
        """Removes the first `num` blocks, at most all. [num] int64."""
        ids = self.first(num)
        if num:
            self._begin = int(self._place[ids[-1]]) + 1
            self.remove(ids)
        return ids

    def clear(self) -> None:
        self._place[:] = -1
        self._begin = self._end = self.num = 0

    def _compact(self, num_more: int) -> None:
        """Drops the stale entries, so that the log has room for `num_more` and seldom needs this again."""
        ids = self.first(self.num)
        self._log = np.empty(max(2 * len(self._place), len(ids) + num_more), np.int64)
        self._log[: len(ids)] = ids
        self._place[ids] = np.arange(len(ids))
        self._begin, self._end = 0, len(ids)

    def check(self) -> None:
        ids = self.first(self.num)
        assert sorted(ids.tolist()) == np.flatnonzero(self._place >= 0).tolist(), "the queue and the places disagree"
