"""Which rows decode, and where each row of a message is in its batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from step_driver import admit, cache_of, make_step

from ringcore.kv_cache.spec import FullAttentionSpec
from ringcore.worker.rows.batch_order import BatchOrder
from ringcore.worker.rows.request_rows import RequestRows

CACHE = cache_of(
    FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=16, dtype="float32"),
    max_model_len=20,
)


@pytest.fixture
def rows() -> RequestRows:
    """The rows 0, 2 and 4 decode; 1, 3 and 5 have five tokens to compute, and 6 has two."""
    rows = RequestRows(7, CACHE, num_eos_tokens=1)
    to_go = [1, 5, 1, 5, 1, 5, 2]
    rows.apply(make_step({}, new=[admit(row, range(8), [1, 2], computed=8 - n) for row, n in enumerate(to_go)]))
    return rows


def order_of(rows: RequestRows, scheduled: Sequence[int], counts: Sequence[int] | None) -> BatchOrder:
    as_array = None if counts is None else np.array(counts, dtype=np.int32)
    return BatchOrder.of(rows, np.array(scheduled, dtype=np.int32), as_array)


def test_decodes_come_first_and_all_keep_their_order(rows: RequestRows) -> None:
    order = order_of(rows, [3, 4, 1, 0, 6, 2, 5], [5, 1, 2, 1, 1, 1, 4])
    assert order.num_decodes == 3
    assert order.scheduled.tolist() == [4, 0, 2, 3, 1, 6, 5]
    assert order.counts is not None
    assert order.counts.tolist() == [1, 1, 1, 5, 2, 1, 4]
    assert order.inverse is not None
    assert order.inverse.tolist() == [3, 0, 4, 1, 5, 2, 6]
    # Selected in the batch: 4, 2, 3 and 5. In the message they come as 3, 4, 2, 5.
    is_selected = np.array([True, False, True, True, False, False, True])
    assert order.in_message_order(is_selected).tolist() == [3, 0, 2, 6]


@pytest.mark.parametrize(
    ("scheduled", "counts", "num_decodes"),
    [
        ([2, 0, 4], None, 3),
        ([2, 0], [1, 1], 2),
        ([3, 6], [1, 1], 0),  # one token each, which is not their last
        ([3, 6], None, 0),
        ([4, 2, 5, 1], [1, 1, 3, 5], 2),
    ],
)
def test_an_order_that_is_right_already_is_the_messages(
    rows: RequestRows, scheduled: list[int], counts: list[int] | None, num_decodes: int
) -> None:
    order = order_of(rows, scheduled, counts)
    assert (order.num_decodes, order.inverse) == (num_decodes, None)
    assert order.scheduled.tolist() == scheduled
    assert (None if order.counts is None else order.counts.tolist()) == counts
    assert order.in_message_order(np.arange(len(scheduled)) % 2 == 1).tolist() == list(range(1, len(scheduled), 2))


def test_a_decode_of_more_tokens_than_one_is_none(rows: RequestRows) -> None:
    """Its drafts are behind the token that it has."""
    order = order_of(rows, [0, 2], [3, 1])
    assert (order.num_decodes, order.scheduled.tolist()) == (1, [2, 0])
    assert order.inverse is not None
    assert order.inverse.tolist() == [1, 0]
