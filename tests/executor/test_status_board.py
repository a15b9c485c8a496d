"""The page on which workers write what they do."""

from __future__ import annotations

import os
import time

import pytest

from ringcore.executor.status_board import StatusBoard, StatusLine, create_board
from ringcore.executor.wire import CALL, STEP


@pytest.fixture
def board():
    """(the parent's side, a function that makes a rank's own line), for 70 ranks: more than a page holds."""
    fd = create_board(70)
    yield StatusBoard(fd, 70), lambda rank: StatusLine(fd, rank)
    os.close(fd)


def test_a_rank_that_has_written_nothing_counts_from_the_boards_creation(board):
    status = board[0].read(69)
    assert 0 <= time.monotonic_ns() - status.heartbeat_ns < 60e9
    assert (status.busy_since_ns, status.num_calls) == (None, 0)


def test_a_call_from_beginning_to_end(board):
    reader, line_of = board
    lines = [line_of(rank) for rank in (0, 68, 69)]
    before = time.monotonic_ns()
    lines[1].begin(12, CALL, "nap")
    status = reader.read(68)
    assert before <= status.busy_since_ns <= time.monotonic_ns()
    assert (status.call_id, status.method, status.num_calls) == (12, "nap", 0)
    assert (status.has_finished(11), status.has_finished(12), status.has_finished(13)) == (True, False, False)
    lines[1].end()
    status = reader.read(68)
    assert (status.busy_since_ns, status.num_calls) == (None, 1)
    assert (status.has_finished(12), status.has_finished(13)) == (True, False)
    assert reader.read(0).num_calls == reader.read(69).num_calls == 0


def test_a_call_that_was_begun_before_the_last_one_ended(board):
    reader, line_of = board
    line = line_of(0)
    line.begin(1, STEP, "execute_model")
    line.end_and_begin(2, STEP, "execute_model")
    status = reader.read(0)
    assert (status.call_id, status.num_calls) == (2, 1)
    assert status.busy_since_ns is not None
    assert (status.has_finished(1), status.has_finished(2)) == (True, False)
    line.end()
    assert (reader.read(0).busy_since_ns, reader.read(0).num_calls) == (None, 2)


def test_a_step_needs_no_name_and_leaves_none(board):
    reader, line_of = board
    line = line_of(3)
    line.begin(1, CALL, "a name that is much longer than its place, é" * 3)
    assert reader.read(3).method == "a name that is much longer than "
    line.begin(2**40, STEP, "execute_model")
    assert (reader.read(3).method, reader.read(3).call_id) == ("execute_model", 2**40)
    line.begin(2**40 + 1, CALL, "m")
    assert reader.read(3).method == "m"


def test_heartbeats(board):
    reader, line_of = board
    line = line_of(1)
    first = reader.read(1).heartbeat_ns
    line.beat()
    assert first < reader.read(1).heartbeat_ns <= time.monotonic_ns()


def test_the_board_outlives_its_descriptor():
    fd = create_board(1)
    board, line = StatusBoard(fd, 1), StatusLine(fd, 0)
    os.close(fd)
    line.begin(1, CALL, "m")
    assert board.read(0).method == "m"
