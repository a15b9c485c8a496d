"""Which replica gets a request."""

from __future__ import annotations

import bisect
import hashlib
import math
from typing import Protocol

import numpy as np

from ringcore.errors import ConfigError
from ringcore.testing.trace import NO_PREFIX, Trace

__all__ = [
    "ROUTINGS",
    "LeastLoaded",
    "PrefixAffinity",
    "ReplicaLoads",
    "RoundRobin",
    "Router",
    "make_router",
    "route_all",
]


class ReplicaLoads:
    """A router's view of the replicas: the number of unfinished requests of each, and of their tokens."""

    def __init__(self, num_replicas: int) -> None:
        self.num_requests = [0] * num_replicas
        self.num_tokens = [0] * num_replicas
        self.total_requests = 0

    def add(self, replica: int, num_tokens: int) -> None:
        self.num_requests[replica] += 1
        self.num_tokens[replica] += num_tokens
        self.total_requests += 1

    def remove(self, replica: int, num_tokens: int) -> None:
        self.num_requests[replica] -= 1
        self.num_tokens[replica] -= num_tokens
        self.total_requests -= 1


class Router(Protocol):
    """needs_loads: whether it looks at them; if not, all requests can be routed before the first one runs."""

    needs_loads: bool

    def pick(self, trace: Trace, index: int, loads: ReplicaLoads) -> int:
        """The replica of request `index`. Called once for each, in the order of arrival."""
        ...


class RoundRobin:
    """One after the other."""

    needs_loads = False

    def __init__(self, num_replicas: int) -> None:
        self._num_replicas, self._next = num_replicas, 0

    def pick(self, trace: Trace, index: int, loads: ReplicaLoads) -> int:
        picked = self._next
        self._next = (picked + 1) % self._num_replicas
        return picked


class LeastLoaded:
    """The one with the fewest unfinished requests; of these, whose requests have the fewest tokens, prompt and asked
    for; of these, the one that was picked the longest ago.
    """

    needs_loads = True

    def __init__(self, num_replicas: int) -> None:
        self._picked_at = [-1] * num_replicas

    def pick(self, trace: Trace, index: int, loads: ReplicaLoads) -> int:
        fewest = min(loads.num_requests)
        least = [i for i, num_requests in enumerate(loads.num_requests) if num_requests == fewest]
        picked = min(least, key=lambda i: (loads.num_tokens[i], self._picked_at[i]))
        self._picked_at[picked] = index
        return picked


class PrefixAffinity:
    """Requests of one prefix go to one replica, found by consistent hashing: replicas have `num_points` points each on
    a ring, and a prefix belongs to the first point after its own. Requests without a prefix go round.

    load_bound: no replica takes a request that brings it above `load_bound` times the mean number of unfinished
    requests; the next one on the ring takes it (Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded
    Loads", 2016). None for no bound.
    """

    def __init__(self, num_replicas: int, load_bound: float | None = 1.25, num_points: int = 64) -> None:
        if load_bound is not None and not 1 < load_bound < math.inf:
            raise ConfigError(
                f"load_bound={load_bound}: give a number above 1, or none for no bound",
                option="load_bound",
                value=load_bound,
            )
        self.needs_loads = load_bound is not None
        self._num_replicas, self._load_bound = num_replicas, load_bound
        ring = sorted(
            (_hash(f"{replica}/{point}"), replica) for replica in range(num_replicas) for point in range(num_points)
        )
        self._points = [point for point, _ in ring]
        self._owners = [replica for _, replica in ring]
        self._orders: dict[int, list[int]] = {}  # by prefix: the replicas in the order in which they would take it
        self._others = RoundRobin(num_replicas)

    def pick(self, trace: Trace, index: int, loads: ReplicaLoads) -> int:
        prefix = int(trace.prefix[index])
        if prefix == NO_PREFIX:
            order = self._order_from(self._others.pick(trace, index, loads))
        else:
            if prefix not in self._orders:
                self._orders[prefix] = self._order_of(trace.prefix_ids[prefix])
            order = self._orders[prefix]
        if self._load_bound is None:
            return order[0]
        most = math.ceil(self._load_bound * (loads.total_requests + 1) / self._num_replicas)
        # There is one: if all were at `most`, they would have more requests than there are.
        return next(replica for replica in order if loads.num_requests[replica] < most)

    def _order_of(self, prefix_id: str) -> list[int]:
        begin = bisect.bisect_right(self._points, _hash(prefix_id))
        return list(dict.fromkeys(self._owners[begin:] + self._owners[:begin]))

    def _order_from(self, first: int) -> list[int]:
        return [*range(first, self._num_replicas), *range(first)]


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


ROUTINGS = ("round-robin", "least-loaded", "prefix-affinity")


def make_router(routing: str, num_replicas: int, load_bound: float | None = 1.25) -> Router:
    """Raises `ConfigError` for a name that is not in `ROUTINGS`, and for a bound that is none."""
    match routing:
        case "round-robin":
            return RoundRobin(num_replicas)
        case "least-loaded":
            return LeastLoaded(num_replicas)
        case "prefix-affinity":
            return PrefixAffinity(num_replicas, load_bound)
    raise ConfigError(f"routing={routing!r}: give one of {', '.join(ROUTINGS)}", option="routing", value=routing)


def route_all(router: Router, trace: Trace, num_replicas: int) -> np.ndarray:
    """[n] int64: the replica of every request, where the router needs no loads."""
    assert not router.needs_loads
    loads = ReplicaLoads(num_replicas)
    return np.array([router.pick(trace, index, loads) for index in range(len(trace))], dtype=np.int64)
