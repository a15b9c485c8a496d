from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringcore.errors import ConfigError
from ringcore.routing.policies import LeastLoaded, PrefixAffinity, ReplicaLoads, RoundRobin, make_router


def loads_of(*requests_and_tokens: tuple[int, int], closed: tuple[int, ...] = ()) -> ReplicaLoads:
    requests, tokens = ([one[i] for one in requests_and_tokens] for i in (0, 1))
    return ReplicaLoads.of([i not in closed for i in range(len(requests))], requests, tokens)


def idle(num_replicas: int, *closed: int) -> ReplicaLoads:
    return loads_of(*[(0, 0)] * num_replicas, closed=closed)


def test_round_robin_skips_what_is_closed():
    router = RoundRobin(3)
    assert [router.pick((), idle(3)) for _ in range(4)] == [0, 1, 2, 0]
    assert [router.pick((), idle(3, 1)) for _ in range(3)] == [2, 0, 2]


def test_least_loaded_counts_requests_then_tokens_then_turns():
    router = LeastLoaded(3)
    assert router.pick((), loads_of((2, 10), (1, 500), (1, 400))) == 2
    assert router.pick((), loads_of((0, 0), (1, 1), (0, 0))) == 0  # 2 was picked, 0 never
    assert router.pick((), loads_of((0, 0), (0, 0), (0, 0))) == 1
    assert router.pick((), loads_of((0, 0), (0, 0), (0, 0))) == 2
    assert router.pick((), loads_of((0, 0), (5, 9), (6, 0), closed=(0,))) == 1


def test_loads_are_given_back():
    loads = ReplicaLoads(2)
    for replica, num_tokens in ((0, 3), (0, 4), (1, 5)):
        loads.add(replica, num_tokens)
    loads.remove(0, 4)
    assert (loads.num_requests, loads.num_tokens, loads.total_requests) == ([1, 1], [3, 5], 2)


def test_loads_of_what_is_open():
    loads = loads_of((2, 7), (1, 5), (4, 0), closed=(2,))
    assert (loads.num_open, loads.total_requests) == (2, 3)


def test_another_replica_moves_few_prefixes():
    """Consistent hashing: with a ninth replica about a ninth of the prefixes move, and all of these to it."""
    before, after = ([PrefixAffinity(n, None).pick((f"p{i}",), idle(n)) for i in range(1000)] for n in (8, 9))
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {8}
    assert 50 < len(moved) < 200


def test_a_closed_replica_moves_its_own_prefixes_alone():
    router = PrefixAffinity(8, None)
    before, without, again = (
        [router.pick((f"p{i}",), loads) for i in range(300)] for loads in (idle(8), idle(8, 3), idle(8))
    )
    assert 3 in before
    assert 3 not in without
    assert all(new == old for old, new in zip(before, without, strict=True) if old != 3)
    assert again == before


@given(
    st.lists(st.tuples(st.integers(-1, 5), st.booleans()), max_size=60),
    st.integers(1, 6),
    st.sets(st.integers(0, 5), max_size=3),
)
def test_no_replica_is_above_the_bound(arrivals, num_replicas, closed):
    """Each request leaves, or stays until the end."""
    closed -= {0}
    is_open = [i not in closed for i in range(num_replicas)]
    router, num_requests = PrefixAffinity(num_replicas, 1.25), [0] * num_replicas
    for prefix, leaves in arrivals:
        loads = ReplicaLoads.of(is_open, num_requests, [0] * num_replicas)
        picked = router.pick((f"p{prefix}", f"q{prefix}") if prefix >= 0 else (), loads)
        assert is_open[picked]
        assert num_requests[picked] + 1 <= math.ceil(1.25 * (sum(num_requests) + 1) / sum(is_open))
        num_requests[picked] += not leaves


def test_the_bound_gives_way_to_the_next_on_the_ring():
    router, loads, picks = PrefixAffinity(3, 1.25), ReplicaLoads(3), []
    for _ in range(4):
        picks.append(router.pick(("p7",), loads))
        loads.add(picks[-1], 1)
    first, second = picks[:2]  # one a replica at most, then two: 1.25 * 3 / 3 rounded up
    assert first != second
    assert picks == [first, second, first, second]


def test_a_conversation_stays_where_it_was():
    """Though its beginning belongs to another replica, which was full when it began."""
    router = PrefixAffinity(4, 1.25)
    home = router.pick(("system",), idle(4))
    full = loads_of(*[(9, 0) if i == home else (0, 0) for i in range(4)])
    away = router.pick(("system", "a question"), full)
    assert away != home
    assert router.pick(("system", "a question", "and another"), idle(4)) == away
    assert router.pick(("system", "something else"), idle(4)) == home
    closed = router.pick(("system", "a question", "and another"), idle(4, away))
    assert closed == home


def test_names_are_forgotten():
    router = PrefixAffinity(4, 1.25, max_names=2)
    home = router.pick(("system",), idle(4))
    full = loads_of(*[(9, 0) if i == home else (0, 0) for i in range(4)])
    assert router.pick(("system", "old"), full) != home
    for i in range(2):
        router.pick(("system", f"new {i}"), idle(4))
    assert router.pick(("system", "old"), idle(4)) == home


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
