"""Quantiles of very many values in little memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

__all__ = ["LogHistogram"]

_SMALLEST = 1e-7  # seconds; what is below counts as this
_NUM_BUCKETS = 3200


@dataclass(slots=True)
class LogHistogram:
    """Counts positive values in buckets whose edges grow by 1%: a quantile is wrong by at most 0.5% of itself.

    From 1e-7 to 6e6 (seconds: a tenth of a microsecond to ten weeks); values beyond count as the last bucket.
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
        for bucket in range(low, high):  # mostly none: a run stays in its bucket
            end = math.ceil((_SMALLEST * self.RATIO ** (bucket + 1) - first) / growth)
            end = min(max(end, done), num_values)
            self.counts[bucket] += (end - done) * count
            done = end
        self.counts[high] += (num_values - done) * count

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    def quantile(self, q: float) -> float:
        """The value below which the share `q` of all lies; NaN where there are none."""
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
        """The middle of a bucket, on the logarithmic scale."""
        return float(_SMALLEST * cls.RATIO ** (bucket + 0.5))


_LOG_RATIO = math.log(LogHistogram.RATIO)


def _bucket(value: float) -> int:
    return min(int(math.log(max(value, _SMALLEST) / _SMALLEST) / _LOG_RATIO), _NUM_BUCKETS - 1)
