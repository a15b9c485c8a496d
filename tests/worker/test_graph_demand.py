"""When a step captures the graph that it misses."""

from __future__ import annotations

from itertools import pairwise

from ringcore.worker.runner.graph_demand import GraphDemand


def test_a_size_that_is_missed_often_and_one_in_many_steps() -> None:
    demand = GraphDemand()
    assert [demand.is_due(8) for _ in range(16)].index(True) == 15
    captured = [step for step in range(1000) if demand.is_due(16 + step % 7)]
    assert len(captured) == 7
    assert all(later - earlier >= 127 for earlier, later in pairwise(captured))


def test_a_size_that_is_missed_seldom_is_not_captured() -> None:
    demand = GraphDemand()
    assert not any(demand.is_due(size) for size in range(1000))
