"""The table of calls with a driver that does nothing and a clock of its own: replies are put in by hand."""

from __future__ import annotations

import pytest

from ringcore.errors import CapacityError, EngineDeadError, RpcTimeoutError, WorkerError
from ringcore.executor.calls import DEATH_GRACE_S, ERROR_GRACE_S, FAR_DEATH_GRACE_S, CallTable
from ringcore.executor.value_codec import decode_value, encode_value


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class IdleDriver:
    def __init__(self, table: CallTable) -> None:
        self.table = table
        self.waits: list[int] = []

    def poll_replies(self) -> None:
        self.table.expire()

    def wait_for(self, call, deadline) -> None:
        self.waits.append(call.call_id)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def table(clock):
    return CallTable(3, clock=clock)


@pytest.fixture
def driver(table):
    return IdleDriver(table)


def worker_error(rank: int) -> WorkerError:
    return WorkerError("failed", rank=rank)


def give(table, call, rank, value) -> None:
    table.take_value(call.call_id, rank, encode_value(value))


def fail(table, call, rank) -> None:
    table.take_error(call.call_id, rank, worker_error(rank), is_step=False)


def open_step(table, driver, number=1):
    return table.open_step(driver, number, lambda part: decode_value([part]))


def test_a_call_settles_with_its_last_reply_in_rank_order(table, driver):
    call = table.open_call(driver, "m", None)
    for rank in (2, 0):
        give(table, call, rank, f"v{rank}")
        assert not call.done()
    give(table, call, 1, "v1")
    assert call.done()
    assert call.result() == ["v0", "v1", "v2"]
    assert [decode_value(parts) for parts in call.encoded_result()] == ["v0", "v1", "v2"]
    assert driver.waits == []


def test_replies_find_their_call_by_id(table, driver):
    first, second = table.open_call(driver, "m", None), table.open_call(driver, "m", None)
    for rank in range(3):
        give(table, second, rank, "second")
    assert (first.done(), second.result()) == (False, ["second"] * 3)


def test_a_value_that_cannot_be_decoded_names_its_rank(table, driver):
    call = table.open_call(driver, "m", None)
    for rank in range(3):
        table.take_value(call.call_id, rank, [b"\xc1"] if rank == 1 else encode_value(rank))
    with pytest.raises(WorkerError, match="DecodeError in 'm' on rank 1"):
        call.result()
    assert len(call.encoded_result()) == 3


# ---------------------------------------------------------------------------------------------------------------
# Late replies.


def test_a_second_reply_of_a_rank_and_one_for_a_settled_call_are_late(table, driver, clock):
    call = table.open_call(driver, "m", None)
    give(table, call, 0, "first")
    give(table, call, 0, "again")
    table.take_value(99, 0, encode_value("nobody's"))
    assert table.num_late_replies == 2
    fail(table, call, 1)
    clock.now += ERROR_GRACE_S
    table.expire()
    give(table, call, 2, "late")
    fail(table, call, 2)
    assert table.num_late_replies == 4
    with pytest.raises(WorkerError) as caught:
        call.result()
    assert caught.value.details["rank"] == 1
    assert list(caught.value.failures) == [1]


def test_an_abandoned_call_is_forgotten(table, driver):
    call = table.open_call(driver, "m", None)
    table.abandon(call)
    give(table, call, 0, "v")
    assert table.num_late_replies == 1


# ---------------------------------------------------------------------------------------------------------------
# Errors.


def test_an_error_waits_for_the_other_ranks(table, driver, clock):
    call = table.open_call(driver, "m", None)
    fail(table, call, 2)
    clock.now += ERROR_GRACE_S - 0.01
    table.expire()
    assert not call.is_settled
    table.take_error(call.call_id, 1, CapacityError("too little", needed_bytes=5), is_step=False)
    give(table, call, 0, "v")
    assert call.is_settled, "all have answered"
    with pytest.raises(CapacityError, match="too little") as caught:
        call.result()
    assert caught.value.details == {
        "needed_bytes": 5,
        "failures": [
            {"rank": 1, "type": "CapacityError", "message": "too little", "details": {"needed_bytes": 5}},
            {"rank": 2, "type": "WorkerError", "message": "failed", "details": {"rank": 2}},
        ],
    }
    assert {rank: type(error) for rank, error in caught.value.failures.items()} == {1: CapacityError, 2: WorkerError}


def test_an_error_waits_no_longer_than_its_grace_counted_from_the_first(table, driver, clock):
    call = table.open_call(driver, "m", None)
    assert table.next_due() is None
    fail(table, call, 2)
    assert table.next_due() == call.due == clock.now + ERROR_GRACE_S
    clock.now += 0.1
    fail(table, call, 1)
    clock.now += ERROR_GRACE_S - 0.1
    assert call.done()
    assert list(call.error.failures) == [1, 2]
    assert call.error.details["rank"] == 1
    assert table.next_due() is None


def test_an_error_does_not_wait_past_the_deadline(table, driver, clock):
    call = table.open_call(driver, "m", 0.1)
    fail(table, call, 0)
    clock.now += 0.1
    assert call.done()
    with pytest.raises(WorkerError):
        call.result()


def test_the_only_rank_need_not_be_waited_for(clock):
    table = CallTable(1, clock)
    for call in (table.open_call(IdleDriver(table), "m", None), open_step(table, IdleDriver(table))):
        fail(table, call, 0)
        assert call.is_settled
        assert list(call.error.failures) == [0]


# ---------------------------------------------------------------------------------------------------------------
# Calls that one rank answers.


def test_a_unique_rank_answers_alone(table, driver):
    call = table.open_call(driver, "m", None, unique_reply_rank=2)
    give(table, call, 2, "mine")
    assert call.result() == "mine"
    assert [decode_value(parts) for parts in call.encoded_result()] == ["mine"]


@pytest.mark.parametrize("rank", [0, 2], ids=["owes nothing", "owes the value"])
def test_an_error_of_a_unique_call_waits_for_no_value(table, driver, clock, rank):
    call = table.open_call(driver, "m", None, unique_reply_rank=2)
    fail(table, call, rank)
    give(table, call, 2, "too late to help")
    clock.now += DEATH_GRACE_S
    assert call.done()
    assert call.error.details["rank"] == rank


def test_a_step_is_rank_0s_alone(table, driver):
    step = open_step(table, driver)
    give(table, step, 0, "output")
    assert step.result() == "output"


def test_a_death_that_explains_an_error_takes_its_place(table, driver):
    """Rank 0 was told by a broken connection, a moment before the kernel told of rank 1."""
    step, call = open_step(table, driver), table.open_call(driver, "m", None)
    fail(table, step, 0)
    fail(table, call, 0)
    table.fail_all(EngineDeadError("gone", rank=1), dead_rank=1)
    for one in (step, call):
        with pytest.raises(EngineDeadError):
            one.result()


def test_an_agent_has_longer_to_tell_of_a_death(driver, clock):
    table = CallTable(2, clock=clock, has_far_ranks=True)
    step, call = open_step(table, driver), table.open_call(driver, "m", None)
    fail(table, step, 0)
    fail(table, call, 0)
    clock.now += 0.9 * FAR_DEATH_GRACE_S
    table.expire()
    assert not step.done()
    assert not call.done()
    clock.now += 0.2 * FAR_DEATH_GRACE_S
    table.expire()
    for one in (step, call):
        with pytest.raises(WorkerError):
            one.result()


def test_a_rank_that_said_why_and_died_is_believed(table, driver):
    call = table.open_creation(driver)
    fail(table, call, 1)
    table.fail_all(EngineDeadError("exit code 1", rank=1), dead_rank=1)
    with pytest.raises(WorkerError):
        call.result()


def test_a_late_error_of_a_step_fails_the_steps_under_way_and_after_but_no_call(table, driver, clock):
    done, under_way, call = open_step(table, driver), open_step(table, driver), table.open_call(driver, "m", None)
    give(table, done, 0, "output")
    table.take_error(done.call_id, 2, worker_error(2), is_step=True)
    after = open_step(table, driver)
    assert after.errors, "not to be sent"
    clock.now += DEATH_GRACE_S
    table.expire()
    for step in (under_way, after):
        with pytest.raises(WorkerError) as caught:
            step.result()
        assert list(caught.value.failures) == [2]
    assert under_way.error is not after.error
    assert not call.done()
    assert done.result() == "output"


def test_new_workers_know_nothing_of_a_failed_step(table, driver):
    done = open_step(table, driver)
    give(table, done, 0, "output")
    table.take_error(done.call_id, 2, worker_error(2), is_step=True)
    table.open_creation(driver)
    assert not open_step(table, driver).errors


# ---------------------------------------------------------------------------------------------------------------
# Deadlines and death.


def test_calls_expire_at_their_deadline(table, driver, clock):
    call, patient = table.open_call(driver, "m", 5.0), table.open_call(driver, "m", None)
    give(table, call, 1, "v")
    clock.now += 4.9
    assert not call.done()
    clock.now += 0.1
    assert call.done()
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
        give(table, call, rank, rank)
    assert call.result() == [0, 1, 2]


def test_a_death_settles_all_each_with_an_error_of_its_own(table, driver):
    calls = [table.open_creation(driver), table.open_call(driver, "m", 1.0), open_step(table, driver)]
    table.fail_all(EngineDeadError("gone", rank=1))
    errors = [call.error for call in calls]
    assert all(isinstance(error, EngineDeadError) and error.details == {"rank": 1} for error in errors)
    assert len({id(error) for error in errors}) == 3


# ---------------------------------------------------------------------------------------------------------------
# Ages.


def test_a_step_ages_from_the_end_of_what_came_before_it(table, driver, clock):
    assert table.oldest_step() is None
    first, second = open_step(table, driver, 7), open_step(table, driver, 8)
    clock.now += 3
    assert table.oldest_step() is first
    assert (table.age_s(first), first.step) == (3, 7)
    give(table, first, 0, "output")
    assert table.oldest_step() is second
    assert table.age_s(second) == 0
    clock.now += 2
    assert table.age_s(second) == 2


def test_read_only_calls_make_no_step_younger(table, driver, clock):
    step = open_step(table, driver)
    control = table.open_call(driver, "peek", None, is_control=True)
    clock.now += 5
    for rank in range(3):
        give(table, control, rank, rank)
    assert table.age_s(step) == 5
    late = table.open_call(driver, "peek", None, is_control=True)
    clock.now += 1
    assert table.age_s(late) == 1
    assert table.in_flight() == [step, late]
