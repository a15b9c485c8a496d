"""Every step that a worker could not do is noticed. A pool of 8 blocks of 4 tokens, rows for 3 requests."""

from __future__ import annotations

import msgspec
import pytest

from ringcore.kv_cache.spec import FullAttentionSpec, KVCacheConfig, KVCacheGroup, SlidingWindowSpec
from ringcore.params.sampling_params import SamplingParams
from ringcore.protocol.codec import int_array
from ringcore.protocol.steps import NewBlocks, NewRequest, SchedulerOutput
from ringcore.testing.fake_rows import FakeRows
from ringcore.testing.step_cost import StepWork

FULL = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=2, dtype="float32")
SLIDING = SlidingWindowSpec(block_size=4, num_kv_heads=1, head_size=2, dtype="float32", sliding_window=5)


def make_rows(*specs) -> FakeRows:
    groups = [KVCacheGroup([f"layers.{i}"], spec) for i, spec in enumerate(specs or [FULL])]
    return FakeRows(3, 16, KVCacheConfig(num_blocks=8, groups=groups, max_model_len=16, max_tokens_in_flight=16))


def new(row=0, num_tokens=6, blocks=(1, 2), **changes) -> NewRequest:
    fields = {
        "row": row,
        "token_ids": int_array(range(num_tokens)),
        "num_prompt_tokens": num_tokens,
        "num_computed_tokens": 0,
        "num_cached_tokens": 0,
        "block_ids": [int_array(blocks)],
        "sampling_params": SamplingParams(max_tokens=8),
        "seed": 0,
        "stop_token_ids": [],
    }
    return NewRequest(**fields | changes)


def step(rows=None, counts=None, **changes) -> SchedulerOutput:
    rows = rows if rows is None else int_array(rows)
    counts = counts if counts is None else int_array(counts)
    fields = {
        "step": 0,
        "num_steps": 1,
        "finished_rows": int_array(),
        "new_requests": [],
        "new_blocks": [],
        "rows": rows,
        "num_scheduled_tokens": counts,
        "num_tokens": sum(counts.tolist()) if counts is not None else (0 if rows is None else len(rows)),
    }
    fields |= changes
    fields["num_tokens"] *= fields["num_steps"]
    return SchedulerOutput(**fields)


def appended(rows, blocks) -> list[NewBlocks]:
    return [NewBlocks(int_array(rows), int_array(blocks))]


def run(rows: FakeRows, message: SchedulerOutput) -> StepWork:
    """As a worker does: every row that has all its tokens computed samples."""
    scheduled = rows.apply(message)
    sampling = rows.advance(scheduled.rows, scheduled.num_scheduled_tokens)
    rows.append_tokens(scheduled.rows[sampling], message.num_steps)
    return scheduled.work


def decoding() -> FakeRows:
    """Row 0 has 6 prompt tokens and one more, in blocks 1 and 2."""
    rows = make_rows()
    assert run(rows, step([0], [6], new_requests=[new()])) == StepWork(6, 1, 6)
    return rows


def test_a_request_from_its_prompt_to_its_end():
    rows = make_rows()
    assert run(rows, step([0], [4], new_requests=[new()])) == StepWork(4, 1, 4)
    assert rows.num_tokens[0] == 6
    assert run(rows, step([0], [2])) == StepWork(2, 1, 6)
    assert run(rows, step(num_tokens=1)) == StepWork(1, 1, 7)
    assert run(rows, step(num_tokens=1)) == StepWork(1, 1, 8)
    assert run(rows, step([0], new_blocks=appended([0], [3]), num_steps=3)) == StepWork(1, 1, 9)
    assert (rows.num_tokens[0], rows.num_computed_tokens[0]) == (12, 11)
    rows.apply(step([], finished_rows=int_array([0])))
    assert rows.num_in_use == 0
    run(rows, step([0], [6], new_requests=[new(blocks=(3, 1))]))


BAD_STARTS = {
    "no row": new(row=3),
    "more tokens than max_model_len": new(num_tokens=17, blocks=(1, 2, 3, 4, 5)),
    "nothing to compute": new(num_computed_tokens=6, num_cached_tokens=6),
    "more computed than cached": new(num_computed_tokens=4),
    "a cached prefix within a block": new(num_computed_tokens=3, num_cached_tokens=3),
    "a cached prefix without its blocks": new(num_tokens=9, num_computed_tokens=8, num_cached_tokens=8, blocks=(1,)),
    "the null block": new(blocks=(1, 0)),
    "a block outside the cache": new(blocks=(1, 8)),
    "a block twice": new(blocks=(1, 1)),
    "too many blocks": new(blocks=(1, 2, 3, 4, 5)),
    "no table of the group": new(block_ids=[]),
}


@pytest.mark.parametrize("request_", BAD_STARTS.values(), ids=BAD_STARTS)
def test_a_request_that_cannot_start(request_):
    with pytest.raises(AssertionError):
        make_rows().apply(step([request_.row], [1], new_requests=[request_]))


BAD_STEPS = {
    "a row that is not in use": step([1]),
    "a row that is no row": step([3]),
    "a negative row": step([-1]),
    "a row twice": step([0, 0]),
    "no token": step([0], [0]),
    "more tokens than it has": step([0], [2]),
    "the tokens are counted wrong": step([0], num_tokens=2),
    "tokens without blocks": step([0], num_steps=3),
    "a finished row that is not in use": step([0], finished_rows=int_array([1])),
    "a finished row that runs": step([0], finished_rows=int_array([0])),
    "finished, and the rows of before": step(num_tokens=1, finished_rows=int_array([0])),
    "a second request in its row": step([0], new_requests=[new(blocks=(3, 4))]),
    "a block of another row": step([0], new_blocks=appended([0], [2])),
    "blocks of a row that is not in use": step([0], new_blocks=appended([1], [3])),
    "the null block appended": step([0], new_blocks=appended([0], [0])),
    "more blocks than a request can have": step([0], new_blocks=appended([0, 0, 0], [3, 4, 5])),
    "another's block to write into": step([0], new_requests=[new(row=1, blocks=(3, 1))]),
    "the same rows, and not one token each": step(None, [1]),
}


@pytest.mark.parametrize("message", BAD_STEPS.values(), ids=BAD_STEPS)
def test_a_step_that_nobody_could_do(message):
    rows = decoding()
    with pytest.raises(AssertionError):
        rows.apply(message)


def test_the_rows_of_before_when_there_was_no_before():
    with pytest.raises(AssertionError):
        make_rows().apply(step(num_tokens=1))


def test_several_steps_are_for_rows_that_decode():
    rows = make_rows()
    run(rows, step([0], [4], new_requests=[new()]))
    with pytest.raises(AssertionError):
        rows.apply(step([0], [1], num_steps=2))


def test_drafts_need_slots():
    """Row 0 has 6 computed tokens of 7 and 8 slots: the last one and a draft."""
    assert run(decoding(), step([0], max_gained=int_array([2]))) == StepWork(2, 1, 8)
    with pytest.raises(AssertionError, match="tokens without blocks"):
        run(decoding(), step([0], max_gained=int_array([3])))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"max_gained": int_array([0])}, "gain no token"),
        ({"max_gained": int_array([2, 2])}, "the most tokens that each row gains"),
        ({"max_gained": int_array([1]), "num_steps": 2}, "several steps, and drafts"),
        ({"max_gained": int_array([17])}, "17 tokens exceed the budget"),
    ],
    ids=["none", "of another row", "several steps", "budget"],
)
def test_drafts_that_no_step_may_have(changes, why):
    with pytest.raises(AssertionError, match=why):
        run(decoding(), step([0], **changes))


def test_drafts_after_a_chunk_of_a_prompt():
    with pytest.raises(AssertionError, match="a row that does not sample"):
        make_rows().apply(step([0], [4], new_requests=[new()], max_gained=int_array([2])))


def test_a_step_over_the_budget():
    rows = make_rows()
    requests = [new(row=0, num_tokens=9, blocks=(1, 2, 3)), new(row=1, num_tokens=9, blocks=(4, 5, 6))]
    with pytest.raises(AssertionError, match="18 tokens exceed the budget"):
        rows.apply(step([0, 1], [9, 9], new_requests=requests))


def test_a_cached_prefix_is_shared():
    rows = decoding()
    prefix = new(row=1, blocks=(1, 3), num_computed_tokens=4, num_cached_tokens=4)
    run(rows, step([0, 1], [1, 2], new_requests=[prefix]))
    rows.apply(step([], finished_rows=int_array([0])))
    with pytest.raises(AssertionError, match="shared with another row"):  # row 1 still reads block 1
        rows.apply(step([0], [6], new_requests=[new(blocks=(1, 2))]))


def test_of_a_wholly_cached_prompt_one_token_is_computed():
    rows = make_rows()
    cached = new(num_tokens=8, num_computed_tokens=7, num_cached_tokens=8)
    assert run(rows, step([0], [1], new_requests=[cached])) == StepWork(1, 1, 8)


def test_a_window_may_have_left_blocks_behind():
    """At position 9 a window of 5 begins with token 5, in the second block."""
    started = new(num_tokens=10, num_computed_tokens=9, num_cached_tokens=9)
    started = msgspec.structs.replace(started, block_ids=[int_array([0, 1, 2])])
    run(make_rows(SLIDING), step([0], [1], new_requests=[started]))
    missing = msgspec.structs.replace(started, block_ids=[int_array([0, 0, 2])])
    with pytest.raises(AssertionError, match="null block"):
        make_rows(SLIDING).apply(step([0], [1], new_requests=[missing]))


def test_how_far_the_engine_gets_by_itself():
    rows = decoding()  # 7 of 14 tokens, 6 computed, slots for 8
    assert rows.decode_work() == StepWork(1, 1, 7)
    assert rows.is_decoding()
    assert rows.steps_to_next_end() == 7
    assert [rows.blocks_missing(n) for n in (1, 2, 3, 6, 7)] == [0, 0, 1, 1, 2]
    run(rows, step([1], [4], new_requests=[new(row=1, blocks=(3, 4))]))
    assert not rows.is_decoding()
    assert rows.decode_work() == StepWork(2, 2, 7 + 5)
    assert [rows.blocks_missing(n) for n in (1, 3, 7)] == [0, 1, 3]
