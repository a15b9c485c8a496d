"""Starts workers on the hosts of a Ray cluster."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from dataclasses import replace

from ringcore.config import EngineConfig
from ringcore.config.admin_keys import new_keys
from ringcore.config.rank_layout import LOCALHOST
from ringcore.errors import EngineDeadError
from ringcore.executor.far.link import Link
from ringcore.executor.far.several_hosts import JoinedHosts, bracketed
from ringcore.executor.ray_cluster.agents import RayAgents
from ringcore.executor.ray_cluster.connection import RayConnection
from ringcore.executor.ray_cluster.placement import Placement, RayHost, layout_of
from ringcore.executor.waiting import DeadlinePassed
from ringcore.executor.worker_host import WorkerHost

__all__ = ["RayHosts"]

_LOOK_S = 0.25  # while agents start, Ray is asked so often whether its placement still holds


class RayHosts:
    """A `HostStarter`. The keys by which its agents join are made for it alone, and reach them as Ray's arguments.

    Ranks on the engine's own node are its children, over the ring, as without Ray, unless they shall have an
    environment that Ray makes. Their resources are reserved by the placement group.
    """

    def __init__(self, config: EngineConfig, factory: str) -> None:
        """Raises `ConfigError` without Ray or its cluster."""
        parallel = config.parallel
        self._config, self._factory = config, factory
        self._is_interrupted = threading.Event()
        with ExitStack() as undo:
            connection = RayConnection(parallel.ray_address, parallel.ray_runtime_env)
            undo.callback(connection.close)
            address = bracketed(connection.ray.util.get_node_ip_address())
            server, client = new_keys("agent")
            self._joined = JoinedHosts(parallel.join_endpoint or f"tcp://{address}:0", server)
            undo.callback(self._joined.close)
            here = None if parallel.ray_runtime_env else connection.ray.get_runtime_context().get_node_id()
            device = config.device.device
            self._placement = Placement(connection.ray, parallel.layout, parallel.ray_resources, device, here)
            undo.callback(self._placement.close)
            self._agents = RayAgents(connection, self._placement, self._joined.address, client)
            self._cleanup = undo.pop_all()

    def start(self) -> list[WorkerHost]:
        """Raises `CapacityError` if Ray places the ranks nowhere in time, `EngineDeadError` if it cannot run an agent,
        and what stopped a host."""
        deadline = time.monotonic() + self._config.parallel.ray_timeout_s
        self._agents.num_deaths = 0
        while True:
            hosts = self._placement.wait(deadline, self._check_open)
            far = [host for host in hosts if host.name != LOCALHOST]
            self._agents.run_on(far)
            environment = self._near_environment(hosts)
            links = None if environment is None else self._links(far, min(deadline, time.monotonic() + _LOOK_S))
            if environment is not None and links is not None:
                layout = layout_of(self._config.parallel.layout, hosts)
                placed = replace(self._config, parallel=replace(self._config.parallel, ranks=layout))
                return self._joined.start(placed, self._factory, links, environment)
            if time.monotonic() >= deadline:
                raise _have_not_joined(hosts)

    def _near_environment(self, hosts: list[RayHost]) -> dict[str, str] | None:
        """Of the workers on this node, if there are any; None while it is not known."""
        for host in hosts:
            if host.name == LOCALHOST:
                environment = self._agents.environment_of(host)
                if environment is None:
                    time.sleep(_LOOK_S)
                return environment
        return {}

    def _links(self, hosts: list[RayHost], deadline: float) -> dict[str, Link] | None:
        """None if they have not all joined in time."""
        try:
            return self._joined.links([host.name for host in hosts], deadline)
        except DeadlinePassed:
            return None

    def _check_open(self) -> None:
        if self._is_interrupted.is_set():
            raise EngineDeadError("the workers were shut down", process="workers")

    def interrupt(self) -> None:
        self._is_interrupted.set()
        self._joined.interrupt()

    def close(self) -> None:
        """Ends the agents. Idempotent."""
        self._cleanup.close()


def _have_not_joined(hosts: list[RayHost]) -> EngineDeadError:
    names = [host.name for host in hosts]
    text = f"the agents that Ray runs on {', '.join(names)} have not joined the engine in time; raise ray_timeout_s"
    return EngineDeadError(text, process="workers", hosts=names)
