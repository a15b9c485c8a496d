"""The block tables of all rows in one KV cache group, and the slot mapping."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

__all__ = ["AppendedBlocks", "BlockTable"]


class AppendedBlocks(NamedTuple):
    """Newly filled entries of a block table."""

    rows: np.ndarray  # [n] int32
    columns: np.ndarray  # [n] int64
    block_ids: np.ndarray  # [n] int32


class BlockTable:
    """The first num_blocks[row] entries of block_ids[row] are the row's blocks, the others 0 (the null block).

    A block that left the sliding window keeps its column: as 0 where it left the window before the row was admitted,
    else as a stale id, whose block another row may own by now.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        # np.zeros commits pages on first touch, so that unused rows cost nothing.
        self.block_ids = np.zeros((max_num_seqs, -(-max_model_len // block_size)), dtype=np.int32)
        self.num_blocks = np.zeros(max_num_seqs, dtype=np.int64)

    def clear(self, rows: np.ndarray) -> None:
        """rows: [n], not empty."""
        self.block_ids[rows, : int(self.num_blocks[rows].max())] = 0
        self.num_blocks[rows] = 0

    def set(self, row: int, block_ids: np.ndarray) -> None:
        """Sets the blocks of a row that has none."""
        self.block_ids[row, : len(block_ids)] = block_ids
        self.num_blocks[row] = len(block_ids)

    def append(self, rows: np.ndarray, block_ids: np.ndarray) -> AppendedBlocks:
        """A row may occur several times: its blocks are appended in the order of the arrays."""
        if not len(rows):
            return AppendedBlocks(rows, rows, block_ids)
        order = np.argsort(rows, kind="stable")
        by_row = rows[order]
        distinct, first, counts = np.unique(by_row, return_index=True, return_counts=True)
        nth = np.arange(len(by_row)) - np.repeat(first, counts)
        appended = AppendedBlocks(by_row, self.num_blocks[by_row] + nth, block_ids[order])
        self.block_ids[by_row, appended.columns] = appended.block_ids
        self.num_blocks[distinct] += counts
        return appended

    def slots(self, rows: np.ndarray, positions: np.ndarray, is_cached: np.ndarray | None) -> np.ndarray:
        """The slot mapping, [n] int64: block_id * block_size + offset for the token positions[i] of row rows[i].

        is_cached: [n] bool. Such a token is recomputed for its logits only; its keys and values are in the prefix
        cache, in a block that other rows may be reading. The recomputed ones can differ in the last bit, so they are
        written to the null block and the shared block keeps its contents.
        """
        blocks, offsets = np.divmod(positions, self.block_size)
        block_ids = self.block_ids[rows, blocks].astype(np.int64)
        if is_cached is not None:
            block_ids[is_cached] = 0
        slots: np.ndarray = block_ids * self.block_size + offsets
        return slots
