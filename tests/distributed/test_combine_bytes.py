"""When a combine takes the place of an all-reduce: by the bytes that a rank sends."""

from __future__ import annotations

import pytest

from ringcore.distributed.combine import combine_bytes, saves_bytes


def test_bytes_of_a_combine():
    """Two ranks, one expert a token: half of the rows are sent, of half of the tokens; then the sums of the others."""
    assert combine_bytes(100, 8, 1, 2, 4) == 100 * 8 / 2 * (4 / 2 + 4)
    assert combine_bytes(100, 8, 1, 2, 2) == 100 * 8 / 2 * (4 / 2 + 2)
    assert combine_bytes(64, 8, 8, 8, 2) < combine_bytes(64, 8, 8, 8, 4) < 2 * 7 / 8 * 64 * 8 * 4


@pytest.mark.parametrize(
    ("hidden", "num_ranks", "k", "crossover"),
    [(2048, 4, 8, 66), (2048, 8, 8, 22), (4096, 8, 8, 11), (7168, 8, 8, 8)],
)
def test_the_crossovers_that_the_design_page_has(hidden, num_ranks, k, crossover):
    """Against one-shot all-reduces, of sums of 16 bits."""
    assert saves_bytes(crossover, hidden, k, num_ranks, 2, is_one_shot=True)
    assert not saves_bytes(crossover - 1, hidden, k, num_ranks, 2, is_one_shot=True)


def test_more_than_half_of_the_bytes_or_fewer_tokens_than_ranks_are_not_combined():
    """On two ranks nearly every token has experts on both, and the sums are at least half as long as the rows."""
    for itemsize in (2, 4):
        assert not saves_bytes(1 << 20, 2048, 8, 2, itemsize, is_one_shot=True)
        assert not saves_bytes(1 << 20, 2048, 8, 2, itemsize, is_one_shot=False)
    assert saves_bytes(4096, 2048, 1, 8, 2, is_one_shot=False)
    assert not saves_bytes(7, 1 << 20, 8, 8, 2, is_one_shot=False)
