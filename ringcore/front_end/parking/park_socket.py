"""The socket by which programs of one user find parked engines: abstract, in a network namespace, for that user alone.

As `engine_core.admin.local_name` has it: nothing is left of it when the program ends, however it ends, and a name is no
permission. Both ends ask the kernel for the other's user.
"""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import NamedTuple

import msgspec

from ringcore.engine_core.admin.local_name import peer_credentials
from ringcore.errors import PermissionDeniedError, RingcoreError
from ringcore.protocol.parking import MAX_BYTES, ParkOffer

__all__ = ["ParkName", "connect_to_park", "find_parks", "listen"]

_NAME = re.compile(r"@ringcore-park/(\d{1,10})/(\d{1,10})/([0-9a-f]{8})")
_TIMEOUT_S = 5.0  # of each message; a program that keeps engines answers in a millisecond, or hangs
_BACKLOG = 16


class ParkName(NamedTuple):
    """uid: of the user. pid: of the program, as its own pid namespace counts."""

    uid: int
    pid: int
    nonce: str

    @property
    def address(self) -> bytes:
        return f"\0ringcore-park/{self.uid}/{self.pid}/{self.nonce}".encode()


def listen() -> socket.socket:
    """This program's socket. Raises `RingcoreError` where a sandbox forbids it."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.bind(ParkName(os.geteuid(), os.getpid(), os.urandom(4).hex()).address)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise RingcoreError(f"engines cannot be parked: no abstract Unix socket can be opened: {error}") from error
    sock.setblocking(False)
    return sock


def find_parks(sockets: Path = Path("/proc/net/unix")) -> list[ParkName]:
    """The programs of this user that keep parked engines. Any user can listen under any name: see `connect_to_park`."""
    try:
        lines = sockets.read_text("utf-8", "replace").splitlines()
    except OSError:
        return []
    found = (_NAME.fullmatch(line.split()[-1]) for line in lines if "@ringcore-park/" in line)
    names = {ParkName(int(one[1]), int(one[2]), one[3]) for one in found if one is not None}
    return sorted(name for name in names if name.uid == os.geteuid())


def connect_to_park(name: ParkName) -> tuple[socket.socket, ParkOffer]:
    """A connection, whose waits have a deadline, and what is offered. Raises `OSError` for a program that is gone or
    silent, `PermissionDeniedError` for another user's, `msgspec.DecodeError` for one of another version."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.settimeout(_TIMEOUT_S)
        sock.connect(name.address)
        uid = peer_credentials(sock).uid
        if uid != os.geteuid():
            text = f"process {name.pid} belongs to user {uid}, and this one to user {os.geteuid()}"
            raise PermissionDeniedError(text, method="connect", scope="read", key=f"user {os.geteuid()}", file="")
        return sock, msgspec.msgpack.decode(sock.recv(MAX_BYTES), type=ParkOffer)
    except BaseException:
        sock.close()
        raise
