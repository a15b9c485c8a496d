import math

import numpy as np
import pytest

from ringcore.host.log_histogram import LogHistogram


def test_quantiles_are_right_to_half_a_percent():
    values = np.random.default_rng(1).lognormal(-4, 1.5, 20_001)
    histogram = LogHistogram()
    histogram.add(values)
    assert histogram.total == len(values)
    for q in (0.01, 0.5, 0.9, 0.99, 1.0):
        exact = float(np.sort(values)[max(math.ceil(q * len(values)) - 1, 0)])
        assert histogram.quantile(q) == pytest.approx(exact, rel=0.00501)
    assert histogram.mean() == pytest.approx(float(values.mean()), rel=0.005)


@pytest.mark.parametrize("growth", [0.0, 1e-9, 1e-4, 0.3])
@pytest.mark.parametrize("num_values", [1, 2, 500])
def test_a_run_is_counted_as_its_values(growth, num_values):
    run, one_by_one = LogHistogram(), LogHistogram()
    run.add_run(0.0123, growth, num_values, 3)
    one_by_one.add(np.repeat(0.0123 + growth * np.arange(num_values), 3))
    assert np.array_equal(run.counts, one_by_one.counts)


def test_what_is_beyond_the_buckets_is_in_the_first_or_the_last():
    histogram = LogHistogram()
    histogram.add(np.array([0.0, 1e-12, 1e12]))
    assert histogram.counts[0] == 2
    assert histogram.counts[-1] == 1


def test_nothing():
    assert math.isnan(LogHistogram().quantile(0.5))
    assert math.isnan(LogHistogram().mean())
