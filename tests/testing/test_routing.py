from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringcore.errors import ConfigError
from ringcore.testing import Trace
from ringcore.testing.routing import LeastLoaded, PrefixAffinity, ReplicaLoads, RoundRobin, make_router, route_all


def make_trace(prefixes: list[int], num_prefixes: int = 50) -> Trace:
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
        prefix_ids=[f"p{i}" for i in range(num_prefixes)],
    )


def loaded(*requests_and_tokens: tuple[int, int]) -> ReplicaLoads:
    loads = ReplicaLoads(len(requests_and_tokens))
    for replica, (num_requests, num_tokens) in enumerate(requests_and_tokens):
        for i in range(num_requests):
            loads.add(replica, num_tokens if i == 0 else 0)
    return loads


def test_round_robin():
    assert route_all(RoundRobin(3), make_trace([-1] * 7), 3).tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_least_loaded_counts_requests_then_tokens_then_turns():
    trace, router = make_trace([-1] * 4), LeastLoaded(3)
    assert router.pick(trace, 0, loaded((2, 10), (1, 500), (1, 400))) == 2
    assert router.pick(trace, 1, loaded((0, 0), (1, 1), (0, 0))) == 0  # 2 was picked, 0 never
    assert router.pick(trace, 2, loaded((0, 0), (0, 0), (0, 0))) == 1
    assert router.pick(trace, 3, loaded((0, 0), (0, 0), (0, 0))) == 2


def test_loads_are_given_back():
    loads = loaded((2, 7), (1, 5))
    loads.remove(0, 7)
    assert (loads.num_requests, loads.num_tokens, loads.total_requests) == ([1, 1], [0, 5], 2)


def test_a_prefix_keeps_its_replica():
    picks = route_all(PrefixAffinity(8, None), make_trace([i % 50 for i in range(200)]), 8)
    by_prefix = picks.reshape(4, 50)
    assert (by_prefix == by_prefix[0]).all()
    assert len(set(picks.tolist())) > 4


def test_another_replica_moves_few_prefixes():
    """Consistent hashing: with a ninth replica about a ninth of the prefixes move, and all of these to it."""
    trace = make_trace(list(range(1000)), 1000)
    before, after = (route_all(PrefixAffinity(n, None), trace, n) for n in (8, 9))
    moved = before != after
    assert set(after[moved].tolist()) == {8}
    assert 0.05 < moved.mean() < 0.2


def test_requests_without_a_prefix_go_round():
    assert route_all(PrefixAffinity(3, None), make_trace([-1] * 5), 3).tolist() == [0, 1, 2, 0, 1]


@given(st.lists(st.tuples(st.integers(-1, 5), st.booleans()), max_size=60), st.integers(1, 6))
def test_no_replica_is_above_the_bound(arrivals, num_replicas):
    """Each request leaves, or stays until the end."""
    trace = make_trace([prefix for prefix, _ in arrivals])
    router, loads = PrefixAffinity(num_replicas, 1.25), ReplicaLoads(num_replicas)
    for index, (_, leaves) in enumerate(arrivals):
        picked = router.pick(trace, index, loads)
        assert loads.num_requests[picked] + 1 <= math.ceil(1.25 * (loads.total_requests + 1) / num_replicas)
        loads.add(picked, 1)
        if leaves:
            loads.remove(picked, 1)


def test_the_bound_gives_way_to_the_next_on_the_ring():
    router, trace = PrefixAffinity(3, 1.25), make_trace([7, 7, 7, 7])
    loads, picks = ReplicaLoads(3), []
    for index in range(4):
        picks.append(router.pick(trace, index, loads))
        loads.add(picks[-1], 1)
    first, second = picks[:2]  # one a replica at most, then two: 1.25 * 3 / 3 rounded up
    assert first != second
    assert picks == [first, second, first, second]


@pytest.mark.parametrize(
    ("routing", "bound", "says"),
    [
        ("random", 1.25, "routing='random': give one of round-robin, least-loaded"),
        ("prefix-affinity", 1.0, "load_bound=1"),
    ],
)
def test_a_routing_that_is_none(routing, bound, says):
    with pytest.raises(ConfigError, match=says):
        make_router(routing, 3, bound)
