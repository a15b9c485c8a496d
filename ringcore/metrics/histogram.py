"""A histogram with Prometheus's buckets, to which many values are added at once."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

__all__ = ["BucketHistogram", "HistogramCounts"]


class HistogramCounts(msgspec.Struct, frozen=True):
    """counts[i] is the number of values up to bounds[i] and above the bound before; the last count is of the rest."""

    bounds: list[float]
    counts: list[int]  # one more than bounds
    sum: float

    @property
    def num_values(self) -> int:
        return sum(self.counts)


class BucketHistogram:
    """Counts values by bucket; not thread-safe. bounds: ascending upper bounds, inclusive."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = np.array(bounds, dtype=np.float64)
        self._counts = np.zeros(len(bounds) + 1, dtype=np.int64)
        self._sum = 0.0

    def add(self, values: np.ndarray | Sequence[float], times: np.ndarray | Sequence[int] | None = None) -> None:
        """values: [n] float64. times: [n] how often each occurred; None: once."""
        values = np.asarray(values, dtype=np.float64)
        counts = np.ones(len(values), dtype=np.int64) if times is None else np.asarray(times, dtype=np.int64)
        buckets = np.searchsorted(self._bounds, values, side="left")
        np.add.at(self._counts, buckets, counts)
        self._sum += float(values @ counts)

    def snapshot(self) -> HistogramCounts:
        return HistogramCounts(self._bounds.tolist(), self._counts.tolist(), self._sum)
