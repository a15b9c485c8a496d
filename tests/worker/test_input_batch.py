from __future__ import annotations

import numpy as np
import pytest
import torch
from step_driver import admit, cache_of, make_step

from ringcore.kv_cache.spec import FullAttentionSpec, SlidingWindowSpec
from ringcore.worker.rows.input_batch import InputBatch
from ringcore.worker.rows.request_rows import UNKNOWN_TOKEN, RequestRows

CPU = torch.device("cpu")

# Blocks of 4 tokens in the first group, of 8 in the second.
CACHE = cache_of(
    FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=16, dtype="float32"),
    SlidingWindowSpec(block_size=8, num_kv_heads=1, head_size=16, dtype="float32", sliding_window=8),
    max_model_len=20,
)


@pytest.fixture
def rows() -> RequestRows:
    """Row 0: 6 tokens, 5 computed (decodes). Row 1: 7 tokens, 4 computed (a prefix hit). Row 3: 9 tokens, none."""
    rows = RequestRows(4, CACHE, num_eos_tokens=1)
    new = [
        admit(0, [10, 11, 12, 13, 14, 15], [3, 7], [4], computed=5),
        admit(1, [20, 21, 22, 23, 24, 25, 26], [2, 5], [8], computed=4),
        admit(3, [30, 31, 32, 33, 34, 35, 36, 37, 38], [9, 1, 6], [10, 11]),
    ]
    rows.apply(make_step({}, new=new))
    return rows


def gather(rows: RequestRows, scheduled: dict[int, int]) -> InputBatch:
    return InputBatch.gather(
        rows, np.array(list(scheduled), dtype=np.int32), np.array(list(scheduled.values()), dtype=np.int32), CPU
    )


def test_a_mixed_step_by_hand(rows: RequestRows) -> None:
    batch = gather(rows, {3: 5, 0: 1, 1: 3})
    assert batch.input_ids.tolist() == [30, 31, 32, 33, 34, 15, 24, 25, 26]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 5, 4, 5, 6]
    full, sliding = batch.metadata
    for meta in batch.metadata:
        assert meta.query_start_loc_cpu.tolist() == [0, 5, 6, 9]
        assert meta.seq_lens_cpu.tolist() == [5, 6, 7]
        assert (meta.num_tokens, meta.num_seqs, meta.max_query_len, meta.max_seq_len) == (9, 3, 5, 7)
    assert full.slot_mapping.tolist() == [36, 37, 38, 39, 4, 29, 20, 21, 22]
    assert full.block_table_cpu.tolist() == [[9, 1], [3, 7], [2, 5]]
    assert sliding.slot_mapping.tolist() == [80, 81, 82, 83, 84, 37, 68, 69, 70]
    assert sliding.block_table_cpu.tolist() == [[10], [4], [8]]
    assert batch.sample_rows.tolist() == [0, 1]  # row 3 has 4 tokens to go
    assert batch.sample_tokens is not None
    assert batch.sample_tokens.tolist() == [5, 8]


def test_dtypes_are_those_of_the_contract(rows: RequestRows) -> None:
    for batch in (gather(rows, {0: 1, 3: 9}), InputBatch.gather(rows, np.array([0, 3], dtype=np.int32), None, CPU)):
        assert str(batch.input_ids.dtype) == str(batch.positions.dtype) == "torch.int64"
        assert batch.sample_rows.dtype == np.int32
        for meta in batch.metadata:
            assert str(meta.slot_mapping.dtype) == "torch.int64"
            for array in (meta.query_start_loc_cpu, meta.seq_lens_cpu, meta.block_table_cpu):
                assert array.dtype == np.int32


def test_no_counts_are_one_token_each(rows: RequestRows) -> None:
    scheduled = np.array([3, 0, 1], dtype=np.int32)
    short, long = InputBatch.gather(rows, scheduled, None, CPU), gather(rows, {3: 1, 0: 1, 1: 1})
    assert short.input_ids.tolist() == long.input_ids.tolist() == [30, 15, 24]
    assert short.positions.tolist() == long.positions.tolist() == [0, 5, 4]
    assert short.sample_rows.tolist() == long.sample_rows.tolist() == [0]
    assert short.sample_tokens is not None
    assert long.sample_tokens is not None
    assert short.sample_tokens.tolist() == long.sample_tokens.tolist() == [1]
    for a, b in zip(short.metadata, long.metadata, strict=True):
        assert a.query_start_loc_cpu.tolist() == b.query_start_loc_cpu.tolist() == [0, 1, 2, 3]
        assert a.seq_lens_cpu.tolist() == b.seq_lens_cpu.tolist() == [1, 6, 5]
        assert a.slot_mapping.tolist() == b.slot_mapping.tolist()
        assert a.block_table_cpu.tolist() == b.block_table_cpu.tolist()
        assert (a.num_tokens, a.num_seqs, a.max_query_len, a.max_seq_len) == (3, 3, 1, 6)
        assert (b.num_tokens, b.num_seqs, b.max_query_len, b.max_seq_len) == (3, 3, 1, 6)


def test_where_every_token_samples_none_are_picked(rows: RequestRows) -> None:
    rows.advance(np.array([1]), np.array([2]))
    batch = gather(rows, {0: 1, 1: 1})
    assert batch.sample_rows.tolist() == [0, 1]
    assert batch.sample_tokens is None


def test_the_next_input_is_the_rows_own_last_token(rows: RequestRows) -> None:
    rows.advance(np.array([0]), None)
    rows.append_tokens(np.array([0]), np.array([77]))
    batch = gather(rows, {0: 1})
    assert batch.input_ids.tolist() == [77]
    assert batch.positions.tolist() == [6]


def test_a_token_that_only_the_device_has_is_a_valid_id(rows: RequestRows) -> None:
    """Until a kernel puts the token in its place."""
    rows.advance(np.array([0]), None)
    rows.append_tokens(np.array([0]), UNKNOWN_TOKEN)
    assert gather(rows, {1: 1, 0: 1}).input_ids.tolist() == [24, 0]


def test_what_is_cached_is_written_to_the_null_block(rows: RequestRows) -> None:
    """8 tokens, all cached: the last is computed again, and others may share its block. The token after it has a slot
    of its own again, and so have the neighbours' tokens."""
    rows.apply(make_step({}, new=[admit(2, range(50, 58), [12, 13, 14], [15, 16], computed=7, cached=8)]))
    full, sliding = gather(rows, {2: 1, 3: 9}).metadata
    assert full.slot_mapping.tolist() == [3, 36, 37, 38, 39, 4, 5, 6, 7, 24]
    assert sliding.slot_mapping.tolist() == [7, 80, 81, 82, 83, 84, 85, 86, 87, 88]
    assert full.block_table_cpu.tolist() == [[12, 13, 14], [9, 1, 6]], "it is read where it is"
    rows.advance(np.array([2]), None)
    rows.append_tokens(np.array([2]), np.array([99]))
    full, sliding = gather(rows, {2: 1}).metadata
    assert (full.slot_mapping.tolist(), sliding.slot_mapping.tolist()) == ([56], [128])


def test_a_row_has_nothing_cached_of_the_one_before_it(rows: RequestRows) -> None:
    rows.apply(make_step({}, new=[admit(2, range(50, 58), [12, 13], [15], computed=7, cached=8)]))
    rows.apply(make_step({}, finished=[2], new=[admit(2, range(60, 64), [12], [15])]))
    assert gather(rows, {2: 4}).metadata[0].slot_mapping.tolist() == [48, 49, 50, 51]


def test_tokens_that_are_not_there_are_our_bug(rows: RequestRows) -> None:
    with pytest.raises(AssertionError, match="tokens that its row does not"):
        gather(rows, {0: 2})
    rows.block_tables[1].num_blocks[3] = 1
    gather(rows, {3: 8})
    with pytest.raises(AssertionError, match="without a block"):
        gather(rows, {3: 9})
