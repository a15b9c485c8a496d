"""Prefix blocks that running requests are computing: a waiting request with the same prefix waits for the cache hit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

__all__ = ["AwaitedBlocks"]


class AwaitedBlocks:
    """The hashes of full blocks that rows are computing. Several rows may be computing the same block."""

    def __init__(self) -> None:
        self._by_row: dict[int, tuple[int, list[bytes]]] = {}  # end of its blocks, hashes of the uncomputed ones
        self._num_rows: Counter[bytes] = Counter()  # how many rows compute the block of this hash

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._num_rows

    def add(self, row: int, first: int, hashes: Sequence[bytes]) -> None:
        """The row, new here, will compute its blocks from number `first` on; these are their hashes."""
        assert row not in self._by_row
        if hashes:
            self._by_row[row] = first + len(hashes), list(hashes)
            self._num_rows.update(hashes)

    def drop_first(self, row: int, num_blocks: int) -> None:
        """Removes the row's first `num_blocks` blocks, which are computed."""
        if row not in self._by_row:
            return
        end, hashes = self._by_row[row]
        num_done = len(hashes) - (end - num_blocks)
        if num_done >= len(hashes):
            self.drop(row)
        elif num_done > 0:
            self._forget(hashes[:num_done])
            del hashes[:num_done]

    def drop(self, row: int) -> None:
        """Removes the row: it will compute no more blocks."""
        _, hashes = self._by_row.pop(row, (0, []))
        self._forget(hashes)

    def _forget(self, hashes: Sequence[bytes]) -> None:
        counts = list(map(self._num_rows.pop, hashes))
        if sum(counts) > len(counts):
            left = zip(hashes, counts, strict=True)
            self._num_rows.update({block_hash: count - 1 for block_hash, count in left if count > 1})

    def check(self, num_computed_blocks: dict[int, int]) -> None:
        """Recomputes the counts. By row in use: the blocks that are computed and published."""
        expected = Counter(block_hash for _, hashes in self._by_row.values() for block_hash in hashes)
        assert expected == self._num_rows, "awaited blocks: the rows and the counts disagree"
        for row, (end, hashes) in self._by_row.items():
            assert row in num_computed_blocks, f"row {row} is not in use, and awaited"
            assert end - len(hashes) >= num_computed_blocks[row], f"row {row}: a computed block is awaited"
