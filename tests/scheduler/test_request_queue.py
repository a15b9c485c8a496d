"""First come, first served; the front for who was there before; removal from anywhere."""

from __future__ import annotations

from array import array

import pytest

from ringcore.protocol import EngineCoreRequest
from ringcore.sampling_params import SamplingParams
from ringcore.scheduler.request import Request
from ringcore.scheduler.request_queue import FCFSQueue


def request(request_id: str) -> Request:
    wire = EngineCoreRequest(request_id, [1], SamplingParams(), arrival_s=0.0)
    return Request(wire, array("i", [1]), max_total_tokens=5, stop_token_ids=[], seed=0)


def test_order():
    queue = FCFSQueue()
    for name in "abcd":
        queue.add(request(name))
    queue.add_front(request("e"))
    assert queue.remove("c").request_id == "c"
    assert [one.request_id for one in queue] == ["e", "a", "b", "d"]
    assert queue.peek().request_id == "e"
    assert [queue.pop().request_id for _ in range(len(queue))] == ["e", "a", "b", "d"]
    assert not queue


def test_each_once():
    queue = FCFSQueue()
    queue.add(request("a"))
    with pytest.raises(AssertionError, match="waits already"):
        queue.add(request("a"))
    with pytest.raises(KeyError):
        queue.remove("b")
