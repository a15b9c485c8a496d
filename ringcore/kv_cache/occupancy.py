"""Who uses the blocks of the KV cache, for those who ask: it reads the books and keeps none."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ringcore.kv_cache.block_pool import BlockPool
from ringcore.kv_cache.group_manager import GroupManager

__all__ = ["CACHED", "FREE", "SHARED", "USED", "Occupancy"]

# States of a block: it holds nothing; a cached prefix that no row has; in one block table; in several.
FREE, CACHED, USED, SHARED = range(4)


class Occupancy:
    """The blocks of one cache. Valid until it changes."""

    def __init__(self, pool: BlockPool, groups: Sequence[GroupManager]) -> None:
        self._pool, self._groups = pool, groups

    def num_blocks_of(self, rows: np.ndarray) -> np.ndarray:
        """The blocks that each of these rows holds, over all groups; shared ones count for each. [n] int64."""
        zero = np.zeros(len(rows), np.int64)
        return sum((group.num_blocks[rows] - group.num_null_blocks[rows] for group in self._groups), zero)

    def count_cells(self, max_cells: int) -> tuple[int, np.ndarray]:
        """Blocks a cell, and how many blocks of each cell are in which state: [num_cells, 4] int64.

        The usable blocks in the order of their ids, in at most max_cells cells; the last cell may have fewer blocks.
        """
        ref_counts, is_cached = self._pool.ref_counts[1:], self._pool.is_cached[1:]
        states = np.where(ref_counts == 0, is_cached * CACHED, USED + (ref_counts > 1))
        per_cell = -(-len(states) // max_cells)
        num_cells = -(-len(states) // per_cell)
        counts = np.bincount(np.arange(len(states)) // per_cell * 4 + states, minlength=num_cells * 4)
        return per_cell, counts.reshape(num_cells, 4)
