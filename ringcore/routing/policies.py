"""Routing policies over replicas: round-robin, least loaded, prefix affinity. The simulator runs the service's own.

A policy picks one of the replicas that are open; at least one is. Replicas are numbers from 0. A policy is not
thread-safe.
"""

from __future__ import annotations

import bisect
import hashlib
import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Protocol

from ringcore.errors import ConfigError

__all__ = ["ROUTINGS", "LeastLoaded", "PrefixAffinity", "ReplicaLoads", "RoundRobin", "Router", "make_router"]

ROUTINGS = ("round-robin", "least-loaded", "prefix-affinity")


class ReplicaLoads:
    """Of each replica: whether it is open, its unfinished requests, and their tokens.

    Invariant: `total_requests` and `num_open` are of the open replicas.
    """

    def __init__(self, num_replicas: int) -> None:
        self.is_open = [True] * num_replicas
        self.num_requests = [0] * num_replicas
        self.num_tokens = [0] * num_replicas
        self.num_open, self.total_requests = num_replicas, 0

    @classmethod
    def of(cls, is_open: list[bool], num_requests: list[int], num_tokens: list[int]) -> ReplicaLoads:
        """As they are now."""
        loads = cls(len(is_open))
        loads.is_open, loads.num_requests, loads.num_tokens = is_open, num_requests, num_tokens
        loads.num_open = sum(is_open)
        loads.total_requests = sum(num for num, is_so in zip(num_requests, is_open, strict=True) if is_so)
        return loads

    def add(self, replica: int, num_tokens: int) -> None:
        self.num_requests[replica] += 1
        self.num_tokens[replica] += num_tokens
        self.total_requests += 1

    def remove(self, replica: int, num_tokens: int) -> None:
        self.num_requests[replica] -= 1
        self.num_tokens[replica] -= num_tokens
        self.total_requests -= 1


class Router(Protocol):
    """needs_loads: whether it reads the numbers of requests; if not, and all replicas are open, all requests can be
    routed before the first one runs."""

    needs_loads: bool

    def pick(self, prefixes: Sequence[str], loads: ReplicaLoads) -> int:
        """The replica of the next request. Called once for each, in the order of arrival.

        prefixes: names of the beginnings of its prompt, from the shortest to the longest; prompts with a name in common
        begin with the same tokens.
        """
        ...


class RoundRobin:
    """Each request goes to the next replica in turn."""

    needs_loads = False

    def __init__(self, num_replicas: int) -> None:
        self._num_replicas, self._next = num_replicas, 0

    def pick(self, prefixes: Sequence[str], loads: ReplicaLoads) -> int:
        picked = self._next
        while not loads.is_open[picked]:
            picked = (picked + 1) % self._num_replicas
        self._next = (picked + 1) % self._num_replicas
        return picked


class LeastLoaded:
    """The replica with the fewest unfinished requests; ties by the fewest tokens, then by the least recently picked."""

    needs_loads = True

    def __init__(self, num_replicas: int) -> None:
        self._picked_at = [-1] * num_replicas
        self._num_picks = 0

    def pick(self, prefixes: Sequence[str], loads: ReplicaLoads) -> int:
        num_open = [num for num, is_open in zip(loads.num_requests, loads.is_open, strict=True) if is_open]
        fewest = min(num_open)
        least = [i for i, num in enumerate(loads.num_requests) if num == fewest and loads.is_open[i]]
        picked = min(least, key=lambda i: (loads.num_tokens[i], self._picked_at[i]))
        self._picked_at[picked] = self._num_picks
        self._num_picks += 1
        return picked


class PrefixAffinity:
    """Requests of one prefix go to one replica.

    A prompt's shortest prefix belongs to a replica by consistent hashing: each replica has `num_points` virtual nodes
    on a hash ring, and a name belongs to the first node after its own hash, of a replica that is open. Longer ones go
    where they went last, so that a conversation stays where its KV cache is, wherever its beginning belongs. Requests
    without a prefix go round-robin.

    load_bound: a replica gets no request that brings it above `load_bound` times the mean number of unfinished
    requests; the next one on the ring gets it (Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded
    Loads", 2016). None for no bound.
    max_names: of longer prefixes that are remembered; those used least recently are forgotten.
    """

    def __init__(
        self,
        num_replicas: int,
        load_bound: float | None = 1.25,
        num_points: int = 64,
        max_names: int = 1 << 16,
    ) -> None:
        if load_bound is not None and not 1 < load_bound < math.inf:
            raise ConfigError(
                f"load_bound={load_bound}: give a number above 1, or none for no bound",
                option="load_bound",
                value=load_bound,
            )
        self.needs_loads = load_bound is not None
        self._num_replicas, self._load_bound, self._max_names = num_replicas, load_bound, max_names
        ring = sorted(
            (_hash(f"{replica}/{point}"), replica) for replica in range(num_replicas) for point in range(num_points)
        )
        self._points = [point for point, _ in ring]
        self._owners = [replica for _, replica in ring]
        self._last: OrderedDict[str, int] = OrderedDict()  # by longer prefix: the replica of its last request
        self._others = RoundRobin(num_replicas)

    def pick(self, prefixes: Sequence[str], loads: ReplicaLoads) -> int:
        most = self._most(loads)
        order = self._from_point(prefixes) if prefixes else self._from_replica(self._others.pick(prefixes, loads))
        # One is below the bound: if all were at it, they would have more requests than there are.
        picked = next(i for i in order if loads.is_open[i] and loads.num_requests[i] < most)
        self._remember(prefixes, picked)
        return picked

    def _most(self, loads: ReplicaLoads) -> float:
        if self._load_bound is None:
            return math.inf
        return math.ceil(self._load_bound * (loads.total_requests + 1) / loads.num_open)

    def _from_point(self, prefixes: Sequence[str]) -> Iterator[int]:
        """The replicas of the longer prefixes, then all in the order of the ring."""
        for name in reversed(prefixes[1:]):
            if (last := self._last.get(name)) is not None:
                yield last
        begin = bisect.bisect_right(self._points, _hash(prefixes[0]))
        yield from self._owners[begin:]
        yield from self._owners[:begin]

    def _from_replica(self, first: int) -> Iterator[int]:
        yield from range(first, self._num_replicas)
        yield from range(first)

    def _remember(self, prefixes: Sequence[str], replica: int) -> None:
        for name in prefixes[1:]:
            self._last[name] = replica
            self._last.move_to_end(name)
        while len(self._last) > self._max_names:
            self._last.popitem(last=False)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def make_router(routing: str, num_replicas: int, load_bound: float | None = 1.25) -> Router:
    """Raises `ConfigError` for a name that is not in `ROUTINGS`, and for an invalid bound."""
    match routing:
        case "round-robin":
            return RoundRobin(num_replicas)
        case "least-loaded":
            return LeastLoaded(num_replicas)
        case "prefix-affinity":
            return PrefixAffinity(num_replicas, load_bound)
    raise ConfigError(f"routing={routing!r}: give one of {', '.join(ROUTINGS)}", option="routing", value=routing)
