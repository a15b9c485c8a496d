"""Two orders of admission, in which one that comes back has its old place; removal from anywhere."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ringcore.params.sampling_params import SamplingParams
from ringcore.protocol.requests import EngineCoreRequest
from ringcore.scheduler.request import Request
from ringcore.scheduler.request_queue import RequestQueue


def request(sequence: int, priority: int = 0, arrival_s: float = 0.0) -> Request:
    wire = EngineCoreRequest(f"r{sequence}", [1], SamplingParams(), arrival_s=arrival_s, priority=priority)
    return Request(wire, np.array([1], np.int32), sequence=sequence, max_total_tokens=5, stop_token_ids=[], seed=0)


def order(queue: RequestQueue) -> list[int]:
    """By iteration, which `pop` agrees with."""
    seen = [one.sequence for one in queue]
    assert len(queue) == len(seen)
    assert [queue.pop().sequence for _ in range(len(queue))] == seen
    assert not queue
    return seen


def test_first_come_first_served():
    queue = RequestQueue("fcfs")
    requests = [request(n, priority=-n, arrival_s=-n) for n in range(5)]
    for number in (3, 0, 4, 1, 2):
        queue.add(requests[number])
    assert queue.peek() is requests[0]
    assert order(queue) == [0, 1, 2, 3, 4], "by the number in the order of arrival, and nothing else"


def test_priority_then_arrival_then_number():
    queue = RequestQueue("priority")
    for number, (priority, arrival_s) in enumerate([(1, 0.0), (0, 5.0), (0, 3.0), (0, 3.0), (-1, 9.0)]):
        queue.add(request(number, priority, arrival_s))
    assert order(queue) == [4, 2, 3, 1, 0]


def test_one_that_comes_back_stands_where_it_stood():
    queue = RequestQueue("fcfs")
    for number in range(4):
        queue.add(request(number))
    first, second = queue.pop(), queue.pop()
    queue.add(second)
    queue.add(first)
    assert order(queue) == [0, 1, 2, 3]


@pytest.mark.parametrize("number", [0, 2, 3])
def test_removal(number):
    queue = RequestQueue("fcfs")
    requests = [request(n) for n in range(4)]
    for one in requests:
        queue.add(one)
    assert requests[number] in queue
    assert queue.remove(f"r{number}") is requests[number]
    assert requests[number] not in queue
    queue.add(requests[number])
    assert queue.remove(f"r{number}") is requests[number], "also one that came back"
    assert order(queue) == [n for n in range(4) if n != number]


def test_each_once():
    queue = RequestQueue("fcfs")
    queue.add(request(0))
    with pytest.raises(AssertionError, match="waits already"):
        queue.add(request(0))
    with pytest.raises(KeyError):
        queue.remove("r1")


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_agrees_with_a_sorted_list(policy):
    rng = random.Random(policy)
    queue, model = RequestQueue(policy), []
    taken = []

    def key(one: Request) -> tuple:
        return (one.sequence,) if policy == "fcfs" else (one.priority, one.arrival_s, one.sequence)

    for sequence in range(2000):
        match rng.randrange(5):
            case 0 if model:
                taken.append(queue.pop())
                assert taken[-1] is model.pop(0)
            case 1 if model:
                one = model.pop(rng.randrange(len(model)))
                assert queue.remove(one.request_id) is one
            case 2 if taken:
                model.append(taken.pop())
                queue.add(model[-1])
            case _:
                model.append(request(sequence, rng.randrange(3), rng.random()))
                queue.add(model[-1])
        model.sort(key=key)
        assert len(queue) == len(model)
        if model:
            assert queue.peek() is model[0]
    assert list(queue) == model
