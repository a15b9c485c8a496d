"""Histograms to which many values are added at once are those of prometheus_client."""

from __future__ import annotations

import random

import pytest
from prometheus_client import CollectorRegistry, Histogram

from ringcore.metrics import BucketHistogram


def test_it_counts_as_prometheus_client_does():
    bounds, random_ = [0.1, 0.5, 1.0, 2.0], random.Random(1)
    values = [random_.choice([*bounds, random_.uniform(0, 3)]) for _ in range(500)]
    theirs = Histogram("x", "x", buckets=bounds, registry=CollectorRegistry())
    ours = BucketHistogram(bounds)
    for i in range(0, 500, 7):
        ours.add(values[i : i + 7])
    for value in values:
        theirs.observe(value)
    (family,) = theirs.collect()
    cumulative = [sample.value for sample in family.samples if sample.name == "x_bucket"]
    counts = ours.snapshot()
    assert [sum(counts.counts[: i + 1]) for i in range(5)] == cumulative
    assert counts.sum == pytest.approx(sum(values))
    assert counts.num_values == 500


def test_a_value_may_occur_many_times():
    histogram = BucketHistogram([1.0, 2.0])
    histogram.add([0.5, 1.5, 1.0], [3, 2, 4])
    assert histogram.snapshot().counts == [7, 2, 0]
    assert histogram.snapshot().sum == 0.5 * 3 + 1.5 * 2 + 4
