from __future__ import annotations

import os
import threading
import time

import pytest

from ringcore.executor import waiting
from ringcore.executor.waiting import (
    OWN_CORE_LOOKS,
    DeadlinePassed,
    PeerDied,
    SpinBudget,
    Waiter,
    drain_event,
    looks_per_yield,
    signal_event,
    spin_budget_s,
)


@pytest.fixture
def event():
    fd = os.eventfd(0, os.EFD_NONBLOCK)
    yield fd
    os.close(fd)


@pytest.fixture
def pipe():
    fds = list(os.pipe())
    yield fds
    for fd in fds:
        os.close(fd)


@pytest.mark.parametrize("spin_s", [0.0, 0.001])
def test_a_condition_that_holds_needs_no_wait(event, pipe, spin_s):
    Waiter([event], [pipe[0]], spin_s).wait(lambda: True, deadline=0.0)


@pytest.mark.parametrize("spin_s", [0.0, 0.001])
def test_an_event_makes_it_look_again_and_is_drained(event, spin_s):
    looks = []

    def ready() -> bool:
        looks.append(1)
        return done.is_set()

    done = threading.Event()
    thread = threading.Thread(target=lambda: (done.set(), signal_event(event)))
    thread.start()
    Waiter([event], [], spin_s).wait(ready, time.monotonic() + 20)
    thread.join()
    drain_event(event)
    with pytest.raises(BlockingIOError):
        os.eventfd_read(event)


def test_an_event_without_the_condition_does_not_end_the_wait(event):
    signal_event(event)
    with pytest.raises(DeadlinePassed):
        Waiter([event]).wait(lambda: False, time.monotonic() + 0.01)


def test_a_missed_event_costs_a_tick_and_no_more(event):
    looks = []
    Waiter([event]).wait(lambda: looks.append(1) or len(looks) == 5, tick_s=0.001)
    assert len(looks) == 5


def test_the_condition_is_looked_at_once_more_before_a_death_or_a_deadline_counts(event, pipe):
    reader, writer = pipe
    os.close(writer)
    pipe.remove(writer)
    looks = []
    Waiter([event], [reader]).wait(lambda: looks.append(1) or len(looks) == 2)
    with pytest.raises(PeerDied) as caught:
        Waiter([event], [reader]).wait(lambda: False)
    assert caught.value.fd == reader
    looks.clear()
    Waiter([event]).wait(lambda: looks.append(1) or len(looks) == 2, deadline=time.monotonic())


@pytest.mark.parametrize("descending", [False, True])
def test_of_several_that_ended_the_last_counts(descending):
    """The order in which they were given, whatever their numbers: an executor's own close comes after its workers."""
    ends = sorted((os.eventfd(1, os.EFD_CLOEXEC) for _ in range(4)), reverse=descending)
    waiter = Waiter([], ends)
    assert waiter.take_events() == ends[-1]
    waiter.close()
    for fd in ends:
        os.close(fd)


def test_taking_events_never_waits(event, pipe):
    waiter = Waiter([event], [pipe[0]])
    assert waiter.take_events() is None
    signal_event(event)
    assert waiter.take_events() is None
    with pytest.raises(BlockingIOError):
        os.eventfd_read(event)
    os.write(pipe[1], b"x")
    assert waiter.take_events() == pipe[0]


def test_a_full_event_is_readable_already(event):
    os.eventfd_write(event, 2**64 - 2)
    signal_event(event)
    assert os.eventfd_read(event) == 2**64 - 2


def test_an_error_of_the_condition_passes_through(event):
    def broken() -> bool:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Waiter([event]).wait(broken)


def test_who_has_no_core_of_its_own_spins_less(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(waiting, "IS_STRONGLY_ORDERED", True)
    assert spin_budget_s(2) == 200e-6
    assert spin_budget_s(3) == 50e-6
    assert looks_per_yield(spin_budget_s(2)) == OWN_CORE_LOOKS
    assert looks_per_yield(spin_budget_s(3)) == 1
    monkeypatch.setattr(waiting, "IS_STRONGLY_ORDERED", False)
    assert spin_budget_s(1) == 0
    assert looks_per_yield(spin_budget_s(1)) == 1


def test_a_short_sleep_makes_patient_and_a_long_one_does_not():
    budget = SpinBudget(200e-6)
    budget.slept(300e-6)  # woken soon: a little more patience would have spared it
    assert budget.seconds == pytest.approx(1e-3)
    budget.slept(900e-6)
    assert budget.seconds == pytest.approx(1e-3)
    budget.slept(0.005)
    assert budget.seconds == 200e-6


def test_who_loses_the_core_twice_in_a_row_sleeps_at_once_for_a_while():
    budget, taken_s = SpinBudget(200e-6), 0.004

    def lose_core(until: float) -> bool:
        time.sleep(max(0.0, until + taken_s - time.monotonic()))
        return True

    assert budget.spin(lose_core)
    assert budget.seconds == 200e-6  # once may be anything
    assert budget.spin(lose_core)
    assert budget.seconds == 0.0
    looks: list[float] = []
    before = time.monotonic()
    assert not budget.spin(lambda until: looks.append(until) or False)  # one look, without a yield
    assert looks[0] <= time.monotonic()
    assert looks[0] >= before


def test_a_rest_grows_while_the_core_stays_taken_and_ends_when_it_is_free():
    budget, now = SpinBudget(200e-6), time.monotonic()
    for rest_s in (waiting.REST_S, 2 * waiting.REST_S, 4 * waiting.REST_S):
        budget.spun(until=now, ended=now + 0.004)
        if rest_s == waiting.REST_S:
            assert budget.seconds_at(now + 0.004) == 200e-6
            budget.spun(until=now, ended=now + 0.004)
        assert budget.seconds_at(now + 0.004 + 0.9 * rest_s) == 0.0
        now += 0.004 + 1.1 * rest_s
        assert budget.seconds_at(now) == 200e-6  # it looks again
    for _ in range(9):
        budget.spun(until=now, ended=now + 0.004)
    assert budget.seconds_at(now + 0.005 + waiting.MAX_REST_S) == 200e-6
    budget.spun(until=now, ended=now)
    budget.spun(until=now, ended=now + 0.004)
    assert budget.seconds_at(now + 0.005 + waiting.MAX_REST_S) == 200e-6


def test_who_does_not_spin_never_begins_to():
    budget = SpinBudget(0.0)
    budget.slept(1e-5)
    assert budget.seconds == 0.0


def test_a_wait_tells_how_long_it_slept():
    event = os.eventfd(0, os.EFD_NONBLOCK)
    assert Waiter([event]).wait(lambda: True) == 0.0
    looks = iter([False, False, True])
    signal_event(event)
    assert Waiter([event]).wait(lambda: next(looks), tick_s=0.001) > 0.0
    os.close(event)
