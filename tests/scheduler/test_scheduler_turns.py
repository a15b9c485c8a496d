"""Turns of requests in a pipeline: every step has its share of those that decode. Blocks of 4 tokens."""

from __future__ import annotations

import pytest
from fake_model import completion
from scheduler_driver import Driver

A, B, C, D = ([1 + 10 * i, 2 + 10 * i] for i in range(4))


def engine_of(num_requests: int, *, max_tokens: int = 9, **sizes) -> Driver:
    """All prompts are in the first step, rows in order."""
    engine = Driver(num_blocks=40, **sizes)
    for name, prompt in zip("abcd"[:num_requests], (A, B, C, D), strict=False):
        engine.add(name, prompt, max_tokens=max_tokens)
    assert engine.launch() == dict.fromkeys(range(num_requests), 2)
    return engine


def next_rows(engine: Driver, num_steps: int) -> list[list[int] | None]:
    """Of steps that follow each other, with as many in flight as may be; None: nothing could be launched."""
    found = []
    for _ in range(num_steps):
        if len(engine.in_flight) == engine.depth:
            engine.update()
        work = engine.launch()
        found.append(None if work is None else list(work))
    return found


def test_two_stages_have_two_batches_by_turns():
    engine = engine_of(4, depth=2, num_stages=2)
    assert engine.depth == 3
    assert next_rows(engine, 6) == [[0, 1], [2, 3], [0, 1], [2, 3], [0, 1], [2, 3]]


def test_batches_of_three_stages_differ_by_one_at_most():
    engine = engine_of(4, depth=2, num_stages=3)
    assert next_rows(engine, 6) == [[0, 1], [2], [3], [0, 1], [2], [3]]
    three = engine_of(3, depth=2, num_stages=3)
    assert next_rows(three, 6) == [[0], [1], [2], [0], [1], [2]]


def test_one_request_waits_for_its_own_tokens():
    """It is in two steps at once: in flight, and next; a third would only wait behind them."""
    engine = engine_of(1, depth=2, num_stages=2)
    assert [engine.launch() for _ in range(2)] == [{0: 1}, None]
    engine.update()
    assert engine.launch() == {0: 1}


def test_without_a_step_ahead_a_request_is_in_one_step():
    engine = engine_of(2, depth=1, num_stages=2)
    assert engine.depth == 2
    assert engine.launch() is None, "both are in the first step"
    engine.update()
    assert next_rows(engine, 4) == [[0], [1], [0], [1]]


def test_chunks_of_a_prompt_take_no_turns():
    """They follow each other, beside those that decode: no token is awaited for them."""
    engine = engine_of(2, depth=2, num_stages=2, budget=5)
    engine.add("c", list(range(30, 42)), max_tokens=2)
    assert [engine.launch() for _ in range(2)] == [{0: 1, 2: 4}, {1: 1, 2: 4}]
    engine.drain()
    assert [engine.tokens(name) for name in "abc"] == [
        completion(A, 9),
        completion(B, 9),
        completion(list(range(30, 42)), 2),
    ]


def test_who_has_all_its_tokens_in_flight_takes_no_place():
    engine = engine_of(2, max_tokens=2, depth=2, num_stages=2)
    engine.add("c", C, max_tokens=9)
    assert next_rows(engine, 5) == [[0, 2], [1], [2], [2], None]


@pytest.mark.parametrize("num_stages", [2, 3])
def test_a_small_budget_starves_nobody(num_stages):
    engine = engine_of(4, max_tokens=50, depth=2, num_stages=num_stages, budget=8)
    engine.add("e", list(range(20, 49)), max_tokens=2)  # its chunks take what is left
    rows = [row for rows in next_rows(engine, 24) for row in rows or []]
    assert max(map(rows.count, range(4))) - min(map(rows.count, range(4))) <= 1
