"""What steps with drafts must promise, by what they bring."""

from __future__ import annotations

import math

import pytest

from ringcore.engine_core.draft_margin import FIRST, MOST, DraftMargin


def run(margin: DraftMargin, num_steps: int, gain: float, cost: float, promised: float, num_rows: int = 4) -> int:
    """Steps of a worker that promises so much, of which one with drafts brings `gain` times the tokens in `cost` times
    the time -> how many had drafts."""
    num_drafted = 0
    for _ in range(num_steps):
        has_drafts = promised >= margin.next(num_rows)
        num_drafted += has_drafts
        tokens, seconds = (int(num_rows * gain), cost) if has_drafts else (num_rows, 1.0)
        margin.record(num_rows, tokens, seconds, has_drafts)
    return num_drafted


def test_drafts_that_pay_go_on():
    margin = DraftMargin()
    assert run(margin, 330, gain=3, cost=1.5, promised=2.0) == 320  # one of 33 has none
    assert margin.next(4) in (FIRST, math.inf)


def test_drafts_that_cost_more_than_they_bring_end_and_are_tried_again():
    margin = DraftMargin()
    assert 8 <= run(margin, 100, gain=1.5, cost=1.9, promised=1.3) <= 16
    assert margin.next(4) > 1.3
    assert 1 <= run(margin, 1000, gain=1.5, cost=1.9, promised=1.3) <= 80
    assert run(margin, 200, gain=6, cost=1.5, promised=4.0) >= 190, "what promises more is still tried"


def test_numbers_of_rows_apart():
    margin = DraftMargin()
    run(margin, 60, gain=1.5, cost=2.5, promised=1.3, num_rows=16)
    assert margin.next(16) > FIRST
    run(margin, 60, gain=3, cost=1.2, promised=1.3, num_rows=1)
    assert margin.next(1) in (FIRST, math.inf)


def test_the_demand_is_bounded():
    margin = DraftMargin()
    run(margin, 5000, gain=1, cost=9, promised=100.0)
    assert margin.next(4) in (MOST, math.inf)


@pytest.mark.parametrize("num_rows", [1, 300])
def test_the_first_step_has_none(num_rows):
    margin = DraftMargin()
    assert margin.next(num_rows) == math.inf
    margin.record(num_rows, num_rows, 0.01, has_drafts=False)
    assert margin.next(num_rows) == FIRST


def test_with_two_steps_in_flight_the_step_after_one_with_drafts_is_not_what_they_are_compared_with():
    """It waited for that one: 1.9 in place of 1, by which drafts of 1.5 times the tokens in 1.6 times would pay."""
    margin = DraftMargin(num_in_flight=2)
    had_drafts, num_drafted = False, 0
    for _ in range(100):
        has_drafts = margin.next(4) <= 1.3
        margin.record(4, 6 if has_drafts else 4, 1.6 if has_drafts else 1.9 if had_drafts else 1.0, has_drafts)
        had_drafts, num_drafted = has_drafts, num_drafted + has_drafts
    assert 8 <= num_drafted <= 16
