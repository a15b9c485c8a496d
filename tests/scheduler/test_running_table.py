"""The columns of those that run: added at the end, moved up when one leaves, told apart by run."""

from __future__ import annotations

import numpy as np
import pytest

from ringcore.params.sampling_params import SamplingParams
from ringcore.protocol.requests import EngineCoreRequest
from ringcore.protocol.row_spans import RowSpans
from ringcore.scheduler.request import Request
from ringcore.scheduler.running_table import RunningTable


def start(table: RunningTable, row: int, tokens: list[int], max_total_tokens: int = 12) -> Request:
    wire = EngineCoreRequest(f"r{row}", tokens, SamplingParams(), arrival_s=0.0, priority=5)
    request = Request(
        wire,
        np.array(tokens, np.int32),
        sequence=100 + row,
        max_total_tokens=max_total_tokens,
        stop_token_ids=[],
        seed=0,
    )
    run = table.add([request], [row], computed=[0], capacity=np.array([16]))
    request.start(row, run, num_cached_tokens=0, now_s=0.0)
    table.has_prefill = True
    table.check()
    return request


@pytest.fixture
def table() -> RunningTable:
    """Rows 3, 0 and 2, in this order."""
    table = RunningTable(max_num_seqs=4, max_model_len=12)
    for row, count in ((3, 4), (0, 1), (2, 3)):
        start(table, row, list(range(10 * row, 10 * row + count)))
    return table


def test_columns_in_the_order_of_admission(table):
    assert table.row.tolist() == table.row_ids.tolist() == [3, 0, 2]
    assert table.known.tolist() == table.total.tolist() == [4, 1, 3]
    assert table.sequence.tolist() == [103, 100, 102]
    assert (table.priority == 5).all()
    assert [request.request_id for request in table.in_order()] == ["r3", "r0", "r2"]
    assert table.tokens_of(2).tolist() == [20, 21, 22]


@pytest.mark.parametrize(
    ("gone", "left"), [([0], [0, 2]), ([1], [3, 2]), ([2], [3, 0]), ([0, 2], [0]), ([2, 1, 0], [])], ids=str
)
def test_the_others_move_up_in_their_order(table, gone, left):
    version = table.version
    for position in gone:
        table.request_at(position).finish()
    table.remove(np.array(gone))
    table.check()
    assert table.row.tolist() == left
    assert table.sequence.tolist() == [100 + row for row in left]
    assert table.version != version


def test_what_is_in_flight_for_a_row_is_not_for_its_next_owner(table):
    rows, runs = table.row_ids, table.run_ids
    table.remove(np.array([1]))
    assert table.positions_of_runs(rows, runs).tolist() == [0, -1, 1]
    start(table, 0, [7])
    assert table.positions_of_runs(rows, runs).tolist() == [0, -1, 1]
    assert rows.tolist() == [3, 0, 2], "what a step remembers does not change under it"


def test_tokens_are_appended_to_their_rows(table):
    table.total += 2
    table.append_tokens(slice(None), np.array([1, 2, 3], dtype=np.int32), RowSpans(1))
    table.append_tokens(np.array([2, 0]), np.array([8, 9], dtype=np.int32), RowSpans(1))
    assert [table.tokens_of(position).tolist() for position in range(3)] == [
        [30, 31, 32, 33, 1, 9],
        [0, 2],
        [20, 21, 22, 3, 8],
    ]


@pytest.mark.parametrize("each", [1, 2])
def test_tokens_of_a_step_of_all_are_appended_and_as_many_confirmed(table, each):
    confirmed = table.confirmed.copy()
    table.schedule_all(each)
    table.append_to_all(np.arange(3 * each, dtype=np.int32), each)
    table.check()
    assert [table.tokens_of(position).tolist()[-each:] for position in range(3)] == np.arange(3 * each).reshape(
        3, each
    ).tolist()
    assert (table.confirmed - confirmed).tolist() == [each] * 3


def test_several_tokens_each(table):
    table.total += 2
    table.append_tokens(np.array([0, 2]), np.array([1, 2, 3, 4], dtype=np.int32), RowSpans(2))
    assert table.tokens_of(0).tolist() == [30, 31, 32, 33, 1, 2]
    assert table.tokens_of(1).tolist() == [0]
    assert table.tokens_of(2).tolist() == [20, 21, 22, 3, 4]


def test_a_number_of_tokens_for_each(table):
    table.total += 3
    table.append_tokens(np.array([0, 2]), np.array([1, 2, 3, 4], dtype=np.int32), RowSpans(1, np.array([3, 1])))
    assert table.tokens_of(0).tolist() == [30, 31, 32, 33, 1, 2, 3]
    assert table.tokens_of(1).tolist() == [0]
    assert table.tokens_of(2).tolist() == [20, 21, 22, 4]


def test_bounds_give_way_to_numbers(table):
    table.total += 4
    table.computed[:] = table.total - 1
    table.confirmed[:] = table.known
    table.confirm_gains(np.array([0, 2]), np.array([4, 4]), np.array([1, 3]))
    assert table.total.tolist() == [5, 5, 6]
    assert table.computed.tolist() == [4, 4, 5]
    assert table.confirmed.tolist() == [4, 1, 5]


def test_room_is_that_of_the_fullest():
    table = RunningTable(max_num_seqs=4, max_model_len=12)
    start(table, 0, [1, 2], max_total_tokens=9)
    start(table, 1, [1, 2], max_total_tokens=5)
    assert table.room() == 3
    table.remove(np.array([1]))
    assert table.room() <= 7, "never too much, until it matters"
    table.total += 7
    table.min_room -= 7
    assert table.room() == 0
