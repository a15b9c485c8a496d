"""A logarithmic histogram: quantiles of very many values in constant memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

__all__ = ["LogHistogram"]

_SMALLEST = 1e-7  # seconds; smaller values are clamped to this
_NUM_BUCKETS = 3200


@dataclass(slots=True)
class LogHistogram:
    """Counts positive values in buckets whose edges grow by 1%: the relative error of a quantile is at most 0.5%.

    From 1e-7 to 6e6 (seconds: a tenth of a microsecond to ten weeks); larger values count in the last bucket.
    """

    RATIO: ClassVar[float] = 1.01

    counts: np.ndarray = field(default_factory=lambda: np.zeros(_NUM_BUCKETS, dtype=np.int64))

    def add(self, values: np.ndarray) -> None:
        """values: [n] float64."""
        buckets = np.log(np.maximum(values, _SMALLEST) / _SMALLEST) / _LOG_RATIO
        np.add.at(self.counts, np.minimum(buckets, _NUM_BUCKETS - 1).astype(np.int64), 1)

    def add_run(self, first: float, growth: float, num_values: int, count: int) -> None:
        """first, first + growth, first + 2 growth, ..., each `count` times; growth >= 0."""
        low, high = _bucket(first), _bucket(first + growth * (num_values - 1))
        done = 0
        for bucket in range(low, high):  # usually empty: a run stays within one bucket
            end = math.ceil((_SMALLEST * self.RATIO ** (bucket + 1) - first) / growth)
            end = min(max(end, done), num_values)
            self.counts[bucket] += (end - done) * count
            done = end
        self.counts[high] += (num_values - done) * count

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    def quantile(self, q: float) -> float:
        """The q-quantile; NaN for an empty histogram."""
        if not self.total:
            return math.nan
        rank = max(math.ceil(q * self.total), 1)
        return self.bucket_value(int(np.searchsorted(np.cumsum(self.counts), rank)))

    def mean(self) -> float:
        if not self.total:
            return math.nan
        used = np.flatnonzero(self.counts)
        return float((self.counts[used] * _SMALLEST * self.RATIO ** (used + 0.5)).sum() / self.total)

    @classmethod
    def bucket_value(cls, bucket: int) -> float:
        """The geometric center of a bucket."""
        return float(_SMALLEST * cls.RATIO ** (bucket + 0.5))


_LOG_RATIO = math.log(LogHistogram.RATIO)


def _bucket(value: float) -> int:
    return min(int(math.log(max(value, _SMALLEST) / _SMALLEST) / _LOG_RATIO), _NUM_BUCKETS - 1)
