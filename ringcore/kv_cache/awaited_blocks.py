"""Prefix blocks that running requests are computing: a waiting request with the same prefix waits for the cache hit.

A row is found by the hash of its first awaited block, on which all later ones depend. Later blocks are hashed when a
request has that block, too: requests that share nothing are hashed no further.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Awaited", "AwaitedBlocks"]


@dataclass(slots=True)
class Awaited:
    """The blocks from number `num_done` to `end` that a row is computing.

    first: the hash of the first one when it started. name_of: the hash of a block, by its number.
    """

    first: bytes
    name_of: Callable[[int], bytes]
    num_done: int
    end: int


class AwaitedBlocks:
    """By row the full blocks that it is computing. Several rows may be computing the same block."""

    def __init__(self) -> None:
        self._by_row: dict[int, Awaited] = {}
        self._rows: dict[bytes, list[int]] = {}  # by the hash of their first blocks

    def add(self, row: int, name_of: Callable[[int], bytes], first: int, end: int) -> None:
        """The row, new here, will compute its blocks from number `first` to `end`."""
        assert row not in self._by_row
        if first < end:
            self._by_row[row] = awaited = Awaited(name_of(first), name_of, first, end)
            self._rows.setdefault(awaited.first, []).append(row)

    def has(self, names: Sequence[bytes]) -> bool:
        """Whether a row is computing the last of a request's first blocks, whose hashes are `names`."""
        if self._rows.keys().isdisjoint(names):
            return False
        block = len(names) - 1
        same_start = [self._by_row[row] for name in names for row in self._rows.get(name, ())]
        return any(one.num_done <= block < one.end and one.name_of(block) == names[block] for one in same_start)

    def drop_first(self, row: int, num_blocks: int) -> None:
        """Removes the row's first `num_blocks` blocks, which are computed."""
        awaited = self._by_row.get(row)
        if awaited is None:
            return
        awaited.num_done = max(awaited.num_done, num_blocks)
        if awaited.num_done >= awaited.end:
            self.drop(row)

    def drop(self, row: int) -> None:
        """Removes the row: it will compute no more blocks."""
        awaited = self._by_row.pop(row, None)
        if awaited is None:
            return
        rows = self._rows[awaited.first]
        rows.remove(row)
        if not rows:
            del self._rows[awaited.first]

    def check(self, num_computed_blocks: dict[int, int]) -> None:
        """Recomputes the rows. By row in use: the blocks that are computed and published."""
        found = sorted(row for rows in self._rows.values() for row in rows)
        assert found == sorted(self._by_row), "awaited blocks: the rows and their first hashes disagree"
        for row, awaited in self._by_row.items():
            assert row in self._rows[awaited.first], f"row {row} has another first block"
            assert row in num_computed_blocks, f"row {row} is not in use, and awaited"
            assert awaited.num_done >= num_computed_blocks[row], f"row {row}: a computed block is awaited"
