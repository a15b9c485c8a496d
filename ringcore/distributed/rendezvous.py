"""Where the ranks of a group find each other: a private file of one host, in which several groups may meet, or an
address of rank 0's host."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

from torch.distributed import FileStore, PrefixStore, ProcessGroupGloo, Store, TCPStore  # type: ignore[attr-defined]

__all__ = ["TIMEOUT", "gloo_options", "group_store", "local_address"]

_TCP = "tcp://"

# Ranks execute the same steps at the same time, or one after the other, so a message waits at most for another rank's
# share of a step; and a dead rank is detected at once by its closed connection. The timeout covers all other hangs.
TIMEOUT = timedelta(seconds=300)


def group_store(rendezvous: str, name: str, rank: int, size: int, timeout: timedelta) -> PrefixStore:
    """The keys of the group `name`. rendezvous: a file's path, or "tcp://HOST:PORT", where rank 0 of the only group
    listens, at that address alone. A process that can write to the file or reach the address can join: both must be
    private. The file stays.

    Raises RuntimeError where rank 0 cannot be reached, OSError where it cannot listen.
    """
    if rendezvous.startswith(_TCP):
        host, port = _host_and_port(rendezvous)
        # A name, and not a descriptor, would have it listen on every interface.
        listen_fd = _listen(host, port) if rank == 0 else None
        store: Store = TCPStore(
            host, port, size, rank == 0, timeout, wait_for_workers=False, master_listen_fd=listen_fd
        )
    else:
        store = FileStore(rendezvous)
    store.set_timeout(timeout)
    return PrefixStore(name, store)


def gloo_options(rendezvous: str, timeout: timedelta) -> Any:
    """Of a group over the loopback interface, or between hosts."""
    address = local_address(rendezvous)
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    where = {"interface": "lo"} if address is None else {"hostname": address}
    options._devices = [ProcessGroupGloo.create_device(**where)]
    options._timeout = timeout
    return options


def local_address(rendezvous: str) -> str | None:
    """The address of this host that the others reach; None if there are none."""
    if not rendezvous.startswith(_TCP):
        return None
    host, port = _host_and_port(rendezvous)
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
