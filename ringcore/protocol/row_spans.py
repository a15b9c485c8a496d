"""Where each row's tokens are in one flat, row-major array, if rows may have different numbers of tokens."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

__all__ = ["ONE_EACH", "RowSpans"]


class RowSpans(NamedTuple):
    """Row i has the counts[i] tokens after those of the rows before it; counts None: each row has `each` tokens."""

    each: int
    counts: np.ndarray | None = None  # [num_rows], each at least 1

    @property
    def per_row(self) -> np.ndarray | int:
        """The number of tokens of each row."""
        return self.each if self.counts is None else self.counts

    def num_tokens(self, num_rows: int) -> int:
        return num_rows * self.each if self.counts is None else int(self.counts.sum())

    def slice_of(self, index: int) -> slice:
        """The place of one row's tokens."""
        if self.counts is None:
            return slice(index * self.each, (index + 1) * self.each)
        begin = int(self.counts[:index].sum())
        return slice(begin, begin + int(self.counts[index]))

    def lists_of(self, indices: list[int], token_ids: np.ndarray) -> list[list[int]]:
        """The tokens of each of these rows."""
        if self.counts is None:
            of_rows: list[list[int]] = token_ids.reshape(-1, self.each)[indices].tolist()
            return of_rows
        return [token_ids[self.slice_of(index)].tolist() for index in indices]

    def rows_at(self, places: np.ndarray) -> np.ndarray:
        """The row of the token at each of these places."""
        if self.counts is None:
            return places // self.each
        return np.searchsorted(np.cumsum(self.counts), places, side="right")

    def offsets(self, num_rows: int) -> np.ndarray:
        """[num_tokens] int64: the place of each token among those of its row."""
        counts = np.full(num_rows, self.each) if self.counts is None else self.counts
        begins = np.cumsum(counts) - counts
        offsets: np.ndarray = np.arange(int(counts.sum())) - np.repeat(begins, counts)
        return offsets

    def repeat(self, of_rows: np.ndarray) -> np.ndarray:
        """of_rows [num_rows], each value once for every token of its row."""
        return np.repeat(of_rows, self.per_row)

    def kept(self, keep: np.ndarray) -> RowSpans:
        """The spans of the rows that keep [num_rows] bool selects."""
        return self if self.counts is None else RowSpans(self.each, self.counts[keep])


ONE_EACH = RowSpans(1)  # of almost every step
