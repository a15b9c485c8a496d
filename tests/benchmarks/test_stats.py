from __future__ import annotations

import pytest

from benchmarks.stats import Summary, pairwise_ratios, summarize


def test_a_summary_is_the_median_and_the_range() -> None:
    assert summarize([3.0, 100.0, 1.0]) == Summary(median=3.0, low=1.0, high=100.0)
    assert summarize([4.0, 1.0, 2.0, 3.0]) == Summary(median=2.5, low=1.0, high=4.0)


def test_nothing_has_no_summary() -> None:
    with pytest.raises(ValueError, match="no samples"):
        summarize([])


def test_ratios_pair_the_rounds_and_are_above_one_when_ahead() -> None:
    assert pairwise_ratios([20.0, 30.0], [10.0, 60.0], higher_is_better=True) == [2.0, 0.5]
    assert pairwise_ratios([20.0, 30.0], [10.0, 60.0], higher_is_better=False) == [0.5, 2.0]


def test_a_slow_minute_that_hits_both_sides_leaves_the_ratio_alone() -> None:
    quiet, disturbed = [100.0, 100.0, 100.0], [100.0, 20.0, 10.0]
    ours = [2 * rate for rate in disturbed]
    assert pairwise_ratios(ours, disturbed, higher_is_better=True) == [2.0, 2.0, 2.0]
    assert summarize(ours).median < summarize(quiet).median


def test_rounds_that_do_not_pair_are_refused() -> None:
    with pytest.raises(ValueError):
        pairwise_ratios([1.0, 2.0], [1.0], higher_is_better=True)
