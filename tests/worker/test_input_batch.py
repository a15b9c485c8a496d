from __future__ import annotations

import numpy as np
import pytest
from step_driver import admit, make_step

from ringcore.worker.input_batch import InputBatch
from ringcore.worker.request_rows import RequestRows


@pytest.fixture
def rows() -> RequestRows:
    """Row 0: 6 tokens, 5 computed (decodes). Row 1: 7 tokens, 4 computed (a prefix hit). Row 3: 9 tokens, none."""
    rows = RequestRows(max_num_seqs=4, max_model_len=20, block_size=4, num_eos_tokens=1)
    new = [
        admit(0, [10, 11, 12, 13, 14, 15], [3, 7], computed=5),
        admit(1, [20, 21, 22, 23, 24, 25, 26], [2, 5], computed=4),
        admit(3, [30, 31, 32, 33, 34, 35, 36, 37, 38], [9, 1, 6]),
    ]
    rows.apply(make_step({}, new=new))
    return rows


def gather(rows: RequestRows, scheduled: dict[int, int]) -> InputBatch:
    return InputBatch.gather(
        rows, np.array(list(scheduled), dtype=np.int32), np.array(list(scheduled.values()), dtype=np.int32)
    )


def test_a_mixed_step_by_hand(rows: RequestRows) -> None:
    batch = gather(rows, {3: 5, 0: 1, 1: 3})
    assert batch.input_ids.tolist() == [30, 31, 32, 33, 34, 15, 24, 25, 26]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 5, 4, 5, 6]
    meta = batch.metadata
    assert meta.query_start_loc_cpu.tolist() == [0, 5, 6, 9]
    assert meta.seq_lens_cpu.tolist() == [5, 6, 7]
    assert meta.slot_mapping.tolist() == [36, 37, 38, 39, 4, 29, 20, 21, 22]
    assert meta.block_table_cpu.tolist() == [[9, 1], [3, 7], [2, 5]]
    assert (meta.num_tokens, meta.num_seqs, meta.max_query_len, meta.max_seq_len) == (9, 3, 5, 7)
    assert batch.sample_rows.tolist() == [0, 1]  # row 3 has 4 tokens to go
    assert batch.sample_tokens is not None
    assert batch.sample_tokens.tolist() == [5, 8]


def test_dtypes_are_those_of_the_contract(rows: RequestRows) -> None:
    batch = gather(rows, {0: 1, 3: 9})
    assert str(batch.input_ids.dtype) == str(batch.positions.dtype) == "torch.int64"
    assert str(batch.metadata.slot_mapping.dtype) == "torch.int64"
    for array in (
        batch.metadata.query_start_loc_cpu,
        batch.metadata.seq_lens_cpu,
        batch.metadata.block_table_cpu,
        batch.sample_rows,
    ):
        assert array.dtype == np.int32


def test_where_every_token_samples_none_are_picked(rows: RequestRows) -> None:
    rows.advance(np.array([1]), np.array([2]))
    batch = gather(rows, {0: 1, 1: 1})
    assert batch.sample_rows.tolist() == [0, 1]
    assert batch.sample_tokens is None


def test_the_next_input_is_the_rows_own_last_token(rows: RequestRows) -> None:
    rows.advance(np.array([0]), np.array([1]))
    rows.append_tokens(np.array([0]), np.array([77]))
    batch = gather(rows, {0: 1})
    assert batch.input_ids.tolist() == [77]
    assert batch.positions.tolist() == [6]


def test_tokens_that_are_not_there_are_our_bug(rows: RequestRows) -> None:
    with pytest.raises(AssertionError, match="tokens that its row does not"):
        gather(rows, {0: 2})
    rows.num_blocks[3] = 1
    with pytest.raises(AssertionError, match="without a block"):
        gather(rows, {3: 5})
