"""Tokens of rows in one flat array: equally many each, or a number of each."""

from __future__ import annotations

import numpy as np
import pytest

from ringcore.protocol.row_spans import RowSpans

EACH, OWN = RowSpans(2), RowSpans(1, np.array([1, 3, 2]))


@pytest.mark.parametrize("spans", [EACH, OWN], ids=["each", "own"])
def test_they_agree_with_lists(spans: RowSpans) -> None:
    counts = [2, 2, 2] if spans is EACH else [1, 3, 2]
    row_of_token = [row for row, count in enumerate(counts) for _ in range(count)]
    assert spans.num_tokens(3) == len(row_of_token) == 6
    assert np.broadcast_to(spans.per_row, 3).tolist() == counts
    assert spans.rows_at(np.arange(6)).tolist() == row_of_token
    assert spans.repeat(np.array([7, 8, 9])).tolist() == [7 + row for row in row_of_token]
    assert spans.offsets(3).tolist() == [place for count in counts for place in range(count)]
    for row in range(3):
        places = list(range(6))[spans.slice_of(row)]
        assert places == [place for place, own in enumerate(row_of_token) if own == row]


def test_those_of_some_rows() -> None:
    keep = np.array([True, False, True])
    assert EACH.kept(keep) == EACH
    assert OWN.kept(keep).per_row.tolist() == [1, 2]
