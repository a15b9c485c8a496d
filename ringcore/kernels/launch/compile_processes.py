"""Processes that compile kernels for a process that has a GPU; they have none.

Triton's front end is Python, so threads of one process take turns at it. Here each thread asks a process of its own,
and finds the binary in Triton's cache on disk. All are forked from one server (`compile_server`), which imports torch
and Triton once. They are killed when this process closes them or dies.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Self

import msgspec

from ringcore.host.interpreter import import_path, interpreter_flags

__all__ = ["MAX_MESSAGE_BYTES", "CompileProcesses", "CompileRequest"]

MAX_MESSAGE_BYTES = 1 << 17  # a few KB; a longer one is not sent
_TIMEOUT_S = 120.0  # of the server's imports and a compilation, which take seconds

_BOOT = """\
import json, sys
header = json.loads(sys.argv[1])
sys.path[:] = header["path"]
from ringcore.kernels.launch.compile_server import serve
serve(header["fds"], header["parent"])
"""


class CompileRequest(msgspec.Struct, frozen=True):
    """A variant, by the names of its kernel, and the GPU's target: backend, architecture, threads of a warp."""

    module: str
    name: str
    specialization: str
    target: tuple[str, int, int]


class CompileProcesses:
    """`num` of them. They die with the thread that starts them. Raises OSError where they cannot be started."""

    def __init__(self, num: int) -> None:
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(num)]
        self._sockets = [ours for ours, _ in pairs]
        fds = [theirs.fileno() for _, theirs in pairs]
        header = json.dumps({"path": import_path(), "fds": fds, "parent": os.getpid()})
        command = [sys.executable, *interpreter_flags(), "-c", _BOOT, header]
        try:
            self._server = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds)
        except OSError:
            self._close_sockets(self._sockets)
            raise
        finally:
            self._close_sockets([theirs for _, theirs in pairs])
        for ours in self._sockets:
            ours.settimeout(_TIMEOUT_S)

    def __len__(self) -> int:
        return len(self._sockets)

    @property
    def pid(self) -> int:
        """Of the server, whose children compile."""
        return self._server.pid

    def compile(self, index: int, request: CompileRequest) -> bool:
        """Whether process `index` has compiled it. If not the caller does, or learns why it cannot. One thread for each
        index."""
        try:
            self._sockets[index].send(msgspec.msgpack.encode(request))
            return self._sockets[index].recv(1) == b"\1"
        except OSError:  # it has died or hangs, or the message is too long
            self._sockets[index].close()
            return False

    def close(self) -> None:
        """Ends all of them, whatever they do. Idempotent."""
        self._close_sockets(self._sockets)
        self._server.kill()  # and so its children
        self._server.wait()

    @staticmethod
    def _close_sockets(sockets: Sequence[socket.socket]) -> None:
        for one in sockets:
            one.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
