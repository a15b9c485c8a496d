"""The table of calls with a driver that does nothing: replies are put in by hand."""

from __future__ import annotations

import pytest

from ringcore.errors import EngineDeadError, RpcTimeoutError, WorkerError
from ringcore.executor.calls import CallTable


class IdleDriver:
    def __init__(self, table: CallTable) -> None:
        self.table = table
        self.waits: list[int] = []

    def take_in(self) -> None:
        self.table.expire(0.0)

    def wait_for(self, call, deadline) -> None:
        self.waits.append(call.call_id)


@pytest.fixture
def table():
    return CallTable(3)


@pytest.fixture
def driver(table):
    return IdleDriver(table)


def worker_error(rank: int) -> WorkerError:
    return WorkerError("failed", rank=rank)


def test_a_call_settles_with_its_last_reply_in_rank_order(table, driver):
    call = table.open_call(driver, "m", None)
    for rank in (2, 0):
        table.take_value(call.call_id, rank, f"v{rank}")
        assert not call.done()
    table.take_value(call.call_id, 1, "v1")
    assert call.done()
    assert call.result() == ["v0", "v1", "v2"]
    assert driver.waits == []


def test_replies_find_their_call_by_id(table, driver):
    first, second = table.open_call(driver, "m", None), table.open_call(driver, "m", None)
    for rank in range(3):
        table.take_value(second.call_id, rank, "second")
    assert (first.done(), second.result()) == (False, ["second"] * 3)


def test_a_second_reply_of_a_rank_and_one_for_a_settled_call_are_late(table, driver):
    call = table.open_call(driver, "m", None)
    table.take_value(call.call_id, 0, "first")
    table.take_value(call.call_id, 0, "again")
    table.take_value(99, 0, "nobody's")
    assert table.num_late_replies == 2
    table.take_error(call.call_id, worker_error(1), is_step=False)
    table.take_value(call.call_id, 2, "late")
    table.take_error(call.call_id, worker_error(2), is_step=False)
    assert table.num_late_replies == 4
    with pytest.raises(WorkerError) as caught:
        call.result()
    assert caught.value.details["rank"] == 1


def test_a_step_is_rank_0s_alone(table, driver):
    step = table.open_step(driver)
    table.take_value(step.call_id, 0, "output")
    assert step.result() == "output"


def test_a_late_error_of_a_step_fails_the_steps_under_way_and_after_but_no_call(table, driver):
    done, under_way, call = table.open_step(driver), table.open_step(driver), table.open_call(driver, "m", None)
    table.take_value(done.call_id, 0, "output")
    table.take_error(done.call_id, worker_error(2), is_step=True)
    after = table.open_step(driver)
    for step in (under_way, after):
        with pytest.raises(WorkerError):
            step.result()
    assert not call.done()
    assert done.result() == "output"


def test_calls_expire_at_their_deadline(table, driver):
    call, patient = table.open_call(driver, "m", 5.0), table.open_call(driver, "m", None)
    table.take_value(call.call_id, 1, "v")
    table.expire(call.deadline - 0.1)
    assert not call.is_settled
    table.expire(call.deadline)
    with pytest.raises(RpcTimeoutError) as caught:
        call.result()
    assert caught.value.details == {"method": "m", "timeout_s": 5.0, "missing_ranks": [0, 2]}
    assert not patient.is_settled


def test_an_impatient_question_leaves_the_call_open(table, driver):
    call = table.open_call(driver, "m", None)
    with pytest.raises(RpcTimeoutError):
        call.result(timeout=0.5)
    assert driver.waits == [call.call_id]
    for rank in range(3):
        table.take_value(call.call_id, rank, rank)
    assert call.result() == [0, 1, 2]


def test_a_death_settles_all_each_with_an_error_of_its_own(table, driver):
    calls = [table.open_creation(driver), table.open_call(driver, "m", 1.0), table.open_step(driver)]
    table.fail_all(EngineDeadError("gone", rank=1))
    errors = [call.error for call in calls]
    assert all(isinstance(error, EngineDeadError) and error.details == {"rank": 1} for error in errors)
    assert len({id(error) for error in errors}) == 3


def test_an_abandoned_call_is_forgotten(table, driver):
    call = table.open_call(driver, "m", None)
    table.abandon(call)
    table.take_value(call.call_id, 0, "v")
    assert table.num_late_replies == 1
