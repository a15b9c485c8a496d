"""How long steps take, and what they compute."""

from __future__ import annotations

import pytest

from ringcore.metrics import StepLog
from ringcore.protocol.codec import int_array
from ringcore.protocol.steps import SchedulerOutput


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def step(num_rows: int | None, num_tokens: int, num_steps: int = 1) -> SchedulerOutput:
    rows = None if num_rows is None else int_array(range(num_rows))
    return SchedulerOutput(0, num_steps, int_array(), [], [], rows, None, num_tokens)


def test_a_step_begins_with_its_launch_or_the_end_of_the_one_before():
    clock = Clock()
    log = StepLog(clock, num_in_flight=0)
    for launched_s, launched in ((1.0, step(2, 9)), (1.25, step(None, 2))):
        clock.now = launched_s
        log.launched(launched)
    log.completed(2.0)  # 1 s
    assert log.metrics().seconds.sum == 1.0
    log.completed(2.5)  # 0.5 s since then, of the same rows
    clock.now = 7.0
    log.launched(step(3, 3))
    log.completed(7.25)  # 0.25 s: nothing was asked for before
    metrics = log.metrics()
    assert metrics.seconds.sum == pytest.approx(1.75)
    assert (metrics.tokens.sum, metrics.requests.sum) == (14, 7)
    assert metrics.seconds.num_values == metrics.tokens.num_values == metrics.requests.num_values == 3


def test_steps_of_one_message():
    clock = Clock()
    log = StepLog(clock, num_in_flight=0)
    log.launched(step(4, 32, num_steps=8))
    log.completed(0.8)
    metrics = log.metrics()
    assert metrics.seconds.num_values == 8
    assert (metrics.seconds.sum, metrics.tokens.sum, metrics.requests.sum) == (pytest.approx(0.8), 32, 32)
    assert dict(zip(metrics.seconds.bounds, metrics.seconds.counts, strict=False))[0.1] == 8


def test_lost_steps_are_none():
    clock = Clock()
    log = StepLog(clock, num_in_flight=2)
    log.lost()
    clock.now = 3.0
    log.launched(step(1, 1))
    log.completed(3.5)
    assert log.metrics().seconds.sum == 0.5


def test_more_steps_than_are_kept():
    log = StepLog(Clock(), num_in_flight=1)
    for _ in range(2000):
        log.launched(step(1, 3))
        log.completed(0.0)
    assert len(log._launches) < 1000
    metrics = log.metrics()
    assert (metrics.tokens.num_values, metrics.tokens.sum) == (2000, 3 * 1999)  # nothing is known of the first
