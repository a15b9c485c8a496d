"""How long steps take, and what they compute."""

from __future__ import annotations

import pytest

from ringcore.metrics import StepLog
from ringcore.protocol.codec import int_array
from ringcore.protocol.output_reader import output_columns
from ringcore.protocol.requests import NO_STATS
from ringcore.protocol.steps import SchedulerOutput


def complete(log: StepLog, launched_s: float, taken_s: float, *composition: int | None) -> None:
    """composition: rows (None: those of the step before), tokens, steps."""
    num_rows, num_tokens, num_steps = (*composition, 1)[:3]
    rows = None if num_rows is None else int_array(range(num_rows))
    step = SchedulerOutput(0, num_steps, int_array(), [], [], rows, None, num_tokens)
    log.completed(step, (0.0, 0.0, launched_s, taken_s, 9.0, 0, 0), output_columns([], NO_STATS))


def test_a_step_begins_with_its_launch_or_the_end_of_the_one_before():
    log = StepLog()
    complete(log, 1.0, 2.0, 2, 9)  # 1 s
    assert log.metrics().seconds.sum == 1.0
    complete(log, 1.25, 2.5, None, 2)  # 0.5 s since then, of the same rows
    complete(log, 7.0, 7.25, 3, 3)  # 0.25 s: nothing was asked for before
    metrics = log.metrics()
    assert metrics.seconds.sum == pytest.approx(1.75)
    assert (metrics.tokens.sum, metrics.requests.sum) == (14, 7)
    assert metrics.seconds.num_values == metrics.tokens.num_values == metrics.requests.num_values == 3


def test_steps_of_one_message():
    log = StepLog()
    complete(log, 0.0, 0.8, 4, 32, 8)
    metrics = log.metrics()
    assert metrics.seconds.num_values == 8
    assert (metrics.seconds.sum, metrics.tokens.sum, metrics.requests.sum) == (pytest.approx(0.8), 32, 32)
    assert dict(zip(metrics.seconds.bounds, metrics.seconds.counts, strict=False))[0.1] == 8


def test_more_steps_than_are_kept():
    log = StepLog()
    for _ in range(2000):
        complete(log, 0.0, 0.0, 1, 3)
    assert len(log._steps) < 1000
    metrics = log.metrics()
    assert (metrics.tokens.num_values, metrics.tokens.sum) == (2000, 3 * 2000)
