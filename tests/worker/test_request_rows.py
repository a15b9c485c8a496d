from __future__ import annotations

import numpy as np
import pytest
from step_driver import admit, cache_of, make_step

from ringcore.kv_cache.spec import FullAttentionSpec
from ringcore.params.sampling_params import SamplingParams
from ringcore.protocol.codec import int_array
from ringcore.protocol.steps import NewBlocks, SchedulerOutput
from ringcore.worker.rows.request_rows import RequestRows

CACHE = cache_of(FullAttentionSpec(block_size=4, num_kv_heads=2, head_size=16, dtype="float32"), max_model_len=20)


@pytest.fixture
def rows() -> RequestRows:
    return RequestRows(4, CACHE, num_eos_tokens=1)


def test_a_new_request_fills_its_row(rows: RequestRows) -> None:
    params = SamplingParams(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, seed=2**40, logprobs=2, min_tokens=1)
    request = admit(2, [7, 8, 9, 5, 6], [3, 4], computed=4, params=params, num_prompt_tokens=3, stop_token_ids=[1, 5])
    rows.apply(make_step({}, new=[request]))
    assert rows.token_ids[2, :5].tolist() == [7, 8, 9, 5, 6]
    assert rows.block_tables[0].block_ids[2].tolist() == [3, 4, 0, 0, 0]
    assert (rows.num_tokens[2], rows.num_computed_tokens[2], rows.num_prompt_tokens[2]) == (5, 4, 3)
    inputs = rows.sampling_inputs(np.array([2], dtype=np.int32))
    assert inputs.parameters["temperature"].tolist() == [0.5]
    assert inputs.parameters["top_k"].tolist() == [3]
    assert inputs.parameters["top_p"].tolist() == pytest.approx([0.9])
    assert inputs.parameters["min_p"].tolist() == pytest.approx([0.1])
    assert inputs.parameters["seed"].tolist() == [2**40]
    assert inputs.parameters["num_logprobs"].tolist() == [2]
    assert inputs.position.tolist() == [5]


def test_blocks_are_appended_in_order_even_several_to_a_row(rows: RequestRows) -> None:
    new = [admit(0, [1] * 4, [9]), admit(1, [1] * 4, [8]), admit(3, [1] * 8, [5, 6])]
    rows.apply(make_step({}, new=new, blocks=[(1, 20), (0, 30), (1, 21), (3, 40), (0, 31), (1, 22)]))
    assert rows.block_tables[0].block_ids.tolist() == [[9, 30, 31, 0, 0], [8, 20, 21, 22, 0], [0] * 5, [5, 6, 40, 0, 0]]
    assert rows.block_tables[0].num_blocks.tolist() == [3, 4, 0, 3]


def test_each_group_has_blocks_of_its_own() -> None:
    """20 tokens are 5 blocks of 4 in the first group and 3 of 8 in the second. 0: the window has left it behind."""
    wide = FullAttentionSpec(block_size=8, num_kv_heads=1, head_size=16, dtype="float32")
    rows = RequestRows(4, cache_of(CACHE.groups[0].spec, wide, max_model_len=20), num_eos_tokens=1)
    new = [admit(0, [1] * 9, [1, 2, 3], [0, 4]), admit(2, [1] * 3, [5], [6])]
    rows.apply(make_step({}, new=new, blocks=[(2, 7, 0), (0, 8, 9)]))
    first, second = rows.block_tables
    assert first.block_ids[[0, 2]].tolist() == [[1, 2, 3, 8, 0], [5, 7, 0, 0, 0]]
    assert second.block_ids[[0, 2]].tolist() == [[0, 4, 9], [6, 0, 0]]
    assert (first.num_blocks.tolist(), second.num_blocks.tolist()) == ([4, 0, 2, 0], [3, 0, 1, 0])
    rows.apply(make_step({}, finished=[0]))
    assert not first.block_ids[0].any()
    assert not second.block_ids[0].any()
    assert (first.num_blocks.tolist(), second.num_blocks.tolist()) == ([0, 0, 2, 0], [0, 0, 1, 0])


def test_rows_that_are_not_named_are_those_of_the_step_before(rows: RequestRows) -> None:
    named = int_array([3, 1])
    rows.apply(_step_of(named))
    named[:] = 0  # a sender in this process may use its array again
    rows.apply(_step_of(None))
    assert rows.scheduled.tolist() == [3, 1]
    rows.apply(_step_of(int_array()))
    assert rows.scheduled.tolist() == []
    rows.apply(_step_of(int_array([2])))
    rows.clear()
    assert rows.scheduled.tolist() == []


def _step_of(rows: np.ndarray | None) -> SchedulerOutput:
    nothing = [NewBlocks(int_array(), int_array())]
    return SchedulerOutput(0, 1, int_array(), [], nothing, rows, None, 0 if rows is None else len(rows))


def test_finished_rows_go_first_so_that_a_row_can_be_reused_in_the_same_delta(rows: RequestRows) -> None:
    rows.apply(make_step({}, new=[admit(1, [1] * 9, [7, 8, 9], params=SamplingParams(min_tokens=5, max_tokens=9))]))
    rows.apply(make_step({}, finished=[1], new=[admit(1, [4, 5], [6])]))
    assert rows.num_tokens[1] == 2
    assert rows.block_tables[0].block_ids[1].tolist() == [6, 0, 0, 0, 0]
    assert len(rows.sampling_inputs(np.array([1])).masked_rows) == 0


def test_a_row_in_use_is_not_given_away(rows: RequestRows) -> None:
    rows.apply(make_step({}, new=[admit(1, [1], [7])]))
    with pytest.raises(AssertionError, match="row 1 is in use"):
        rows.apply(make_step({}, new=[admit(1, [1], [8])]))


def test_tokens_are_appended_and_counted(rows: RequestRows) -> None:
    rows.apply(make_step({}, new=[admit(0, [5, 6], [1]), admit(2, [7], [2])]))
    rows.advance(np.array([0, 2]), np.array([2, 1]))
    rows.append_tokens(np.array([2, 0]), np.array([70, 50]))
    assert rows.token_ids[0, :3].tolist() == [5, 6, 50]
    assert rows.token_ids[2, :2].tolist() == [7, 70]
    assert rows.num_tokens.tolist() == [3, 0, 2, 0]
    assert rows.num_computed_tokens.tolist() == [2, 0, 1, 0]


def test_several_tokens_are_appended_of_which_the_last_is_the_next_input(rows: RequestRows) -> None:
    rows.apply(make_step({}, new=[admit(0, [5, 6], [1]), admit(2, [7], [2]), admit(3, [8], [3])]))
    rows.advance(np.array([0, 2, 3]), np.array([2, 1, 1]))
    rows.append_tokens(np.array([2, 0, 3]), np.array([70, 71, 72, 50, 80, 81]), np.array([3, 1, 2]))
    assert rows.token_ids[0, :4].tolist() == [5, 6, 50, 0]
    assert rows.token_ids[2, :5].tolist() == [7, 70, 71, 72, 0]
    assert rows.token_ids[3, :4].tolist() == [8, 80, 81, 0]
    assert rows.num_tokens.tolist() == [3, 0, 4, 3]
    assert rows.num_computed_tokens.tolist() == [2, 0, 3, 2]


def test_stop_tokens_are_barred_until_min_tokens(rows: RequestRows) -> None:
    eager = SamplingParams(min_tokens=2, max_tokens=9)
    new = [
        admit(0, [5, 6], [1], params=eager, stop_token_ids=[1, 30]),
        admit(1, [5, 6], [2], stop_token_ids=[1]),  # min_tokens 0
        admit(2, [5, 6, 9, 9], [3], params=eager, num_prompt_tokens=2, stop_token_ids=[1]),  # has generated 2
        admit(3, [5, 6, 9], [4], params=eager, num_prompt_tokens=2, stop_token_ids=[40]),  # has generated 1
    ]
    rows.apply(make_step({}, new=new))
    inputs = rows.sampling_inputs(np.array([3, 2, 1, 0]))
    assert list(zip(inputs.masked_rows.tolist(), inputs.masked_ids.tolist(), strict=True)) == [(0, 40), (3, 1), (3, 30)]


def test_clear_forgets_everything(rows: RequestRows) -> None:
    rows.apply(make_step({}, new=[admit(0, [5, 6], [1]), admit(3, [7] * 8, [2, 3])]))
    rows.clear()
    assert not rows.num_tokens.any()
    assert not rows.block_tables[0].block_ids.any()
    rows.apply(make_step({}, new=[admit(3, [8], [4])]))
    assert rows.block_tables[0].block_ids[3].tolist() == [4, 0, 0, 0, 0]
