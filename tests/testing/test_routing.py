"""A trace's requests, routed by the service's policies."""

from __future__ import annotations

import numpy as np

from ringcore.routing.policies import PrefixAffinity, ReplicaLoads, RoundRobin
from ringcore.testing import Trace
from ringcore.testing.routing import pick_replica, route_all


def make_trace(prefixes: list[int]) -> Trace:
    """One request for each; -1 has no prefix."""
    num = len(prefixes)
    ones = np.ones(num, dtype=np.int64)
    return Trace(
        time_s=np.arange(num, dtype=np.float64),
        prompt_tokens=ones,
        output_tokens=ones,
        prefix=np.array(prefixes, dtype=np.int64),
        prefix_tokens=ones,
        priority=ones,
        prefix_ids=[f"p{i}" for i in range(50)],
    )


def test_round_robin():
    assert route_all(RoundRobin(3), make_trace([-1] * 7), 3).tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_a_prefix_keeps_its_replica():
    picks = route_all(PrefixAffinity(8, None), make_trace([i % 50 for i in range(200)]), 8)
    by_prefix = picks.reshape(4, 50)
    assert (by_prefix == by_prefix[0]).all()
    assert len(set(picks.tolist())) > 4


def test_requests_without_a_prefix_go_round():
    router, trace = PrefixAffinity(3, None), make_trace([-1] * 5)
    assert [pick_replica(router, trace, i, ReplicaLoads(3)) for i in range(5)] == [0, 1, 2, 0, 1]
