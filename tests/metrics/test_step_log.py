"""How long steps take, and what they compute."""

from __future__ import annotations

import numpy as np
import pytest

from ringcore.engine_core.admin.step_times import BATCH, StepTimes
from ringcore.metrics import StepLog
from ringcore.protocol.introspection import MAX_STEPS

START = (0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, 0, 0, 0, 0, 1)


def step(launched_s: float, taken_s: float, num_tokens: int, num_rows: int, num_steps: int = 1):
    return (0, 0.0, 0.0, launched_s, taken_s, 9.0, 0, num_tokens, 0, 1, num_rows, num_steps)


def test_a_step_begins_with_its_launch_or_the_end_of_the_one_before():
    log = StepLog()
    first = step(1.0, 2.0, 9, 2)  # 1 s
    log.count([START, first])
    assert log.metrics().seconds.sum == 1.0
    second = step(1.25, 2.5, 2, 2)  # 0.5 s since then
    log.count([first, second, step(7.0, 7.25, 3, 3)])  # 0.25 s: nothing was asked for before
    metrics = log.metrics()
    assert metrics.seconds.sum == pytest.approx(1.75)
    assert (metrics.tokens.sum, metrics.requests.sum) == (14, 7)
    assert metrics.seconds.num_values == metrics.tokens.num_values == metrics.requests.num_values == 3


def test_steps_of_one_message():
    log = StepLog()
    log.count([START, step(0.0, 0.8, 32, 4, 8)])
    metrics = log.metrics()
    assert metrics.seconds.num_values == 8
    assert (metrics.seconds.sum, metrics.tokens.sum, metrics.requests.sum) == (pytest.approx(0.8), 32, 32)
    assert dict(zip(metrics.seconds.bounds, metrics.seconds.counts, strict=False))[0.1] == 8


def test_every_step_since_the_first_question_is_counted_once():
    """Whenever it is asked, and whatever is no longer kept; `report` is of the last ones."""
    times, random = StepTimes(lambda: 100.0), np.random.default_rng(3)
    tokens = random.integers(1, 100, 5 * MAX_STEPS).tolist()
    num_before = 700
    for number, num_tokens in enumerate(tokens, start=1):
        times.record(step(number - 0.25, number, num_tokens, 1 + number % 7))
        if not number % BATCH:
            times.end_batch()
        if number >= num_before and number % 1111 in (0, num_before % 1111):
            assert times.metrics().tokens.sum == sum(tokens[num_before:number])
            assert times.num_tokens == (sum(tokens[:number]), number)
        assert len(times._steps) <= MAX_STEPS + 1 + BATCH
    metrics = times.metrics()
    assert metrics.tokens.sum == sum(tokens[num_before:])
    assert metrics.requests.num_values == metrics.seconds.num_values == len(tokens) - num_before
    assert metrics.seconds.sum == pytest.approx(0.25 * (len(tokens) - num_before))
    report = times.report(num_last=3)
    assert report.num_steps == MAX_STEPS
    assert report.last["num_scheduled_tokens"] == tokens[-3:]
