"""The executor whose hosts Ray finds: `executor="ray"`."""

from __future__ import annotations

from ringcore.executor.multiproc import MultiprocExecutor
from ringcore.executor.ray_cluster.hosts import RayHosts

__all__ = ["RayExecutor"]


class RayExecutor(MultiprocExecutor):
    """A `MultiprocExecutor`, all of whose workers are on hosts that Ray finds, and finds again where one is lost."""

    host_starter = staticmethod(RayHosts)
