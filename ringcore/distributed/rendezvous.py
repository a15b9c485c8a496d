"""Where the ranks of an engine find each other: a private file of one host, or an address of rank 0's host."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from torch.distributed import FileStore, PrefixStore, ProcessGroupGloo, Store, TCPStore  # type: ignore[attr-defined]

__all__ = ["TIMEOUT", "Rendezvous"]

_TCP = "tcp://"

# Ranks execute the same steps at the same time, or one after the other, so a message waits at most for another rank's
# share of a step; and a dead rank is detected at once by its closed connection. The timeout covers all other hangs.
TIMEOUT = timedelta(seconds=300)


class Rendezvous:
    """One rank's connection to the place where all ranks of an engine find each other, in groups with a name each.

    address: of this host, that the other hosts reach; None where every rank is on one host.
    """

    def __init__(self, place: str, rank: int, size: int, timeout: timedelta = TIMEOUT) -> None:
        """place: a file's path, or "tcp://HOST:PORT", where rank 0 of `size` listens, at that address alone. A process
        that can write to the file or reach the address can join: both must be private. The file stays.

        Raises RuntimeError where rank 0 cannot be reached, OSError where it cannot listen.
        """
        self.timeout = timeout
        self.address: str | None = None
        if not place.startswith(_TCP):
            self._store: Store = FileStore(place)
        else:
            host, port = _host_and_port(place)
            self.address = _address_towards(host, port)
            # A name, and not a descriptor, would have it listen on every interface.
            listen_fd = _listen(host, port) if rank == 0 else None
            self._store = TCPStore(
                host, port, size, rank == 0, timeout, wait_for_workers=False, master_listen_fd=listen_fd
            )
        self._store.set_timeout(timeout)

    def store(self, group: str) -> PrefixStore:
        """The keys of the group of this name. They can be read as long as rank 0 has one of its groups."""
        return PrefixStore(group, self._store)

    def gloo_options(self) -> Any:
        """Of a group over the loopback interface, or between hosts."""
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        where = {"interface": "lo"} if self.address is None else {"hostname": self.address}
        options._devices = [ProcessGroupGloo.create_device(**where)]
        options._timeout = self.timeout
        return options


def _address_towards(host: str, port: int) -> str:
    with socket.socket(_family(host), socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing: it only finds the way
        return str(probe.getsockname()[0])


def _listen(host: str, port: int) -> int:
    with socket.create_server((host, port), family=_family(host)) as server:
        return server.detach()


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _host_and_port(rendezvous: str) -> tuple[str, int]:
    found = urlsplit(rendezvous)
    assert found.hostname is not None, rendezvous
    assert found.port is not None, rendezvous
    return found.hostname, found.port
