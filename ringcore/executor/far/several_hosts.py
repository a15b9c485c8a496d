"""Starts workers on several hosts: on this one, if it has ranks, and on those that join."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ringcore.config import EngineConfig
from ringcore.config.admin_keys import ServerKeys, read_server_keys
from ringcore.config.rank_layout import LOCALHOST, RankLayout
from ringcore.errors import EngineDeadError
from ringcore.executor.far.ends import HostListener
from ringcore.executor.far.frames import Join, installed_version
from ringcore.executor.far.host import FarHost
from ringcore.executor.waiting import DeadlinePassed, spin_budget_s
from ringcore.executor.worker_host import HostStart, NearHost, WorkerHost

if TYPE_CHECKING:
    from ringcore.executor.far.link import Link

__all__ = ["JoinedHosts", "SeveralHosts", "bracketed", "free_port", "held_port"]

JOIN_TIMEOUT_S, START_TIMEOUT_S = 600.0, 60.0


class JoinedHosts:
    """Hosts that join at an endpoint. address: that, with the port that was picked."""

    def __init__(self, endpoint: str, keys: ServerKeys) -> None:
        self._names: Sequence[str] = ()  # of those that may join
        self._version = installed_version()
        self._listener = HostListener(endpoint, keys, self._check)
        self.address = self._listener.address
        self.interrupt, self.close = self._listener.interrupt, self._listener.close

    def _check(self, join: Join) -> str | None:
        if join.host not in self._names:
            return f"no rank is on a host {join.host!r}; the hosts are {', '.join(self._names)}"
        if join.version != self._version:
            return f"it has ringcore {join.version}, the engine {self._version}; install one version"
        return None

    def links(self, names: Sequence[str], deadline: float) -> dict[str, Link]:
        """The link to each of these hosts, once all have joined; no others may. The caller closes them.

        Raises `DeadlinePassed`, and `EngineDeadError` after `interrupt`.
        """
        self._names = names
        return self._listener.wait_for(names, deadline)

    def missing(self, names: Sequence[str]) -> list[str]:
        """Those that have not joined."""
        return [name for name in names if not self._listener.is_waiting(name)]

    def start(
        self, config: EngineConfig, factory: str, links: Mapping[str, Link], environment: Mapping[str, str]
    ) -> list[WorkerHost]:
        """The hosts of the configuration, this one first; it owns the links. environment: of this host's workers.
        Raises what stopped a host; then all are closed."""
        layout = config.parallel.layout
        with ExitStack() as undo:
            for link in links.values():
                undo.callback(link.close)
            rendezvous = self._rendezvous(layout)
            spin_s = spin_budget_s(1 + layout.num_ranks_on(LOCALHOST))
            far = []
            for name, link in links.items():
                far.append(FarHost(HostStart(config, name, factory, rendezvous), link, spin_s))
                undo.callback(far[-1].close)
            near: list[WorkerHost] = []
            if LOCALHOST in layout.hosts:
                near = [NearHost(HostStart(config, LOCALHOST, factory, rendezvous, dict(environment)))]
                undo.callback(near[0].close)
            for host in far:
                host.wait_started(time.monotonic() + START_TIMEOUT_S, self._listener.closing_fd)
            undo.pop_all()
            return [*near, *far]

    def _rendezvous(self, layout: RankLayout) -> str | None:
        """Where rank 0 listens: on this host at the address that others reach, or on its own. None for one host."""
        first = layout.hosts[0]
        if len(set(layout.hosts)) == 1:
            return None
        if first != LOCALHOST:
            joined = self._listener.joined[first]
            return f"tcp://{bracketed(joined.address)}:{joined.note.rendezvous_port}"
        host = urlsplit(self.address).hostname or ""
        return f"tcp://{bracketed(host)}:{free_port(host)}"


class SeveralHosts:
    """A `HostStarter` whose hosts are those of the configuration, started by hand: `ringcore worker --join`."""

    def __init__(self, config: EngineConfig, factory: str) -> None:
        parallel = config.parallel
        assert parallel.join_endpoint is not None
        assert parallel.join_keys is not None
        self._config, self._factory = config, factory
        self._far = [name for name in dict.fromkeys(parallel.layout.hosts) if name != LOCALHOST]
        self._joined = JoinedHosts(parallel.join_endpoint, read_server_keys(parallel.join_keys, "join_keys"))
        self.interrupt, self.close = self._joined.interrupt, self._joined.close

    def start(self) -> list[WorkerHost]:
        try:
            links = self._joined.links(self._far, time.monotonic() + JOIN_TIMEOUT_S)
        except DeadlinePassed:
            raise self._missing() from None
        return self._joined.start(self._config, self._factory, links, {})

    def _missing(self) -> EngineDeadError:
        missing = self._joined.missing(self._far)
        return EngineDeadError(
            f"the hosts {', '.join(missing)} have not joined at {self._joined.address}; run 'ringcore worker --join "
            "tcp://HOST:PORT --keys DIR' there",
            process="workers",
            hosts=missing,
        )


def bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def free_port(host: str) -> int:
    """A TCP port of this host where nothing listens now."""
    with held_port(host) as held:
        return int(held.getsockname()[1])


def held_port(host: str) -> socket.socket:
    """A socket that keeps a TCP port of this host for one that will listen there, with SO_REUSEADDR as it has, until it
    is closed; a connection would be given the port otherwise."""
    held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((host, 0))
    return held
