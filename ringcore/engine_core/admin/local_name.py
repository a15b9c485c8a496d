"""The name of an engine's private socket.

It is an abstract Unix socket: the name is in no directory, so nothing is left of it when the process ends, however it
ends. It belongs to a network namespace: every process of that namespace sees it, in /proc/net/unix, and none outside.
A name is no permission. Both ends ask the kernel for the other's user (SO_PEERCRED), so that a socket of another
user is refused, whatever its name.
"""

from __future__ import annotations

import re
import socket
import struct
from typing import NamedTuple

__all__ = ["LocalName", "PeerCredentials", "peer_credentials"]

_NAME = r"ringcore/(\d{1,10})/(\d{1,10})/([0-9a-f]{8})"
_UCRED = struct.Struct("iII")


class LocalName(NamedTuple):
    """uid: the engine's user. pid: of the engine process, as its own pid namespace counts. engine_id: 8 hexadecimal
    digits, so that two engines of one pid in different pid namespaces have different names."""

    uid: int
    pid: int
    engine_id: str

    @property
    def address(self) -> bytes:
        """For bind and connect: a leading NUL byte makes it abstract."""
        return b"\0" + str(self).encode()

    def __str__(self) -> str:
        return f"ringcore/{self.uid}/{self.pid}/{self.engine_id}"

    @classmethod
    def parse(cls, name: str) -> LocalName | None:
        """The name of an engine's socket; None for any other name."""
        found = re.fullmatch(_NAME, name)  # compiled by those who look for engines
        return None if found is None else cls(int(found[1]), int(found[2]), found[3])


class PeerCredentials(NamedTuple):
    """pid: 0 if it is in a pid namespace that this process cannot see."""

    pid: int
    uid: int


def peer_credentials(sock: socket.socket) -> PeerCredentials:
    """Of the process that connected, or of the one that listens: as the kernel recorded them then."""
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return PeerCredentials(pid, uid)
