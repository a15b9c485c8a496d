"""The routing of a trace's requests, by the policies of the service."""

from __future__ import annotations

import numpy as np

from ringcore.routing.policies import ReplicaLoads, Router
from ringcore.testing.trace import NO_PREFIX, Trace

__all__ = ["pick_replica", "route_all"]


def pick_replica(router: Router, trace: Trace, index: int, loads: ReplicaLoads) -> int:
    """The replica of request `index`, whose one prefix is that of the trace."""
    prefix = int(trace.prefix[index])
    return router.pick(() if prefix == NO_PREFIX else (trace.prefix_ids[prefix],), loads)


def route_all(router: Router, trace: Trace, num_replicas: int) -> np.ndarray:
    """[n] int64: the replica of every request, where the router needs no loads."""
    assert not router.needs_loads
    loads = ReplicaLoads(num_replicas)
    return np.array([pick_replica(router, trace, index, loads) for index in range(len(trace))], dtype=np.int64)
