"""Starts workers on several hosts: on this one, if it has ranks, and on those that join."""

from __future__ import annotations

import socket
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ringcore.config import EngineConfig
from ringcore.config.admin_keys import read_server_keys
from ringcore.config.rank_layout import LOCALHOST
from ringcore.executor.far.ends import HostListener
from ringcore.executor.far.frames import Join, installed_version
from ringcore.executor.far.host import FarHost
from ringcore.executor.waiting import spin_budget_s
from ringcore.executor.worker_host import HostStart, NearHost, WorkerHost

if TYPE_CHECKING:
    from ringcore.executor.far.link import Link

__all__ = ["SeveralHosts"]

JOIN_TIMEOUT_S, START_TIMEOUT_S = 600.0, 60.0


class SeveralHosts:
    """A `HostStarter`. address: where hosts join."""

    def __init__(self, config: EngineConfig, factory: str) -> None:
        parallel = config.parallel
        assert parallel.join_endpoint is not None
        assert parallel.join_keys is not None
        self._config, self._factory, self._version = config, factory, installed_version()
        self._far = [name for name in dict.fromkeys(parallel.layout.hosts) if name != LOCALHOST]
        self._listener = HostListener(
            parallel.join_endpoint, read_server_keys(parallel.join_keys, "join_keys"), self._check
        )
        self.address = self._listener.address

    def _check(self, join: Join) -> str | None:
        if join.host not in self._far:
            return f"no rank is on a host {join.host!r}; the hosts are {', '.join(self._far)}"
        if join.version != self._version:
            return f"it has ringcore {join.version}, the engine {self._version}; install one version"
        return None

    def start(self) -> list[WorkerHost]:
        """This host first. Raises what stopped a host; then all are closed."""
        layout = self._config.parallel.layout
        links = self._listener.wait_for(self._far, time.monotonic() + JOIN_TIMEOUT_S)
        with ExitStack() as undo:
            for link in links.values():
                undo.callback(link.close)
            rendezvous = self._rendezvous(links)
            spin_s = spin_budget_s(1 + layout.num_ranks_on(LOCALHOST))
            far = []
            for name, link in links.items():
                far.append(FarHost(HostStart(self._config, name, self._factory, rendezvous), link, spin_s))
                undo.callback(far[-1].close)
            near: list[WorkerHost] = []
            if LOCALHOST in layout.hosts:
                near = [NearHost(HostStart(self._config, LOCALHOST, self._factory, rendezvous))]
                undo.callback(near[0].close)
            for host in far:
                host.wait_started(time.monotonic() + START_TIMEOUT_S, self._listener.closing_fd)
            undo.pop_all()
            return [*near, *far]

    def _rendezvous(self, links: dict[str, Link]) -> str:
        """Where rank 0 listens: on this host at the address that others reach, or on its own."""
        first = self._config.parallel.layout.hosts[0]
        if first != LOCALHOST:
            joined = self._listener.joined[first]
            return f"tcp://{_bracketed(joined.address)}:{joined.note.rendezvous_port}"
        host = urlsplit(self.address).hostname or ""
        return f"tcp://{_bracketed(host)}:{free_port(host)}"

    def interrupt(self) -> None:
        self._listener.interrupt()

    def close(self) -> None:
        self._listener.close()


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def free_port(host: str) -> int:
    """A TCP port of this host where nothing listens now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
