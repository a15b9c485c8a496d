"""Administration by the engine's own user on this host: an abstract Unix socket, without port, key or file.

The kernel says which user connects (SO_PEERCRED). The engine's own user and root get in; a process that the user runs
could do the same to the engine with a debugger, so it has every scope. Frames are those of the engine's other socket
(`transport.framing`), and need no thread.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import count

from ringcore.config.admin_keys import KnownClient
from ringcore.curve.logged_counter import LoggedCounter
from ringcore.engine_core.admin.listener import AdminListener, Incoming
from ringcore.engine_core.admin.local_name import LocalName, peer_credentials
from ringcore.engine_core.transport.frame_reader import FrameReader
from ringcore.engine_core.transport.framing import (
    Buffer,
    Frame,
    FrameError,
    FrameLimits,
    FrameWriter,
    StreamClosed,
    encode_frame,
)
from ringcore.protocol.scopes import SCOPES

__all__ = ["MAX_CONNECTIONS", "LocalListener"]

MAX_CONNECTIONS = 64
_BACKLOG = 64  # connections that wait while the engine starts, or a step of its own process runs
_BYTES_PER_READ = 4 << 20  # reading a large message must not delay the workers' next step
_ROOT = 0


class _Connection:
    """identity: unique in the listener's life, which a descriptor is not."""

    def __init__(self, sock: socket.socket, identity: bytes, client: KnownClient, limits: FrameLimits) -> None:
        self.socket, self.identity, self.client = sock, identity, client
        self.reader = FrameReader(sock, limits, _BYTES_PER_READ)
        self.writer = FrameWriter(sock)


class LocalListener(AdminListener):
    """The listening socket and its connections, in one epoll, which is level-triggered. Raises `OSError` where a
    sandbox forbids the socket."""

    def __init__(self, name: LocalName, limits: FrameLimits) -> None:
        self._limits = limits
        self._users = {_ROOT, os.geteuid()}
        self._refused = LoggedCounter("refused %d connections to the engine's private socket, the last one: %s")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self._socket.bind(name.address)
            self._socket.listen(_BACKLOG)
        except BaseException:
            self._socket.close()
            raise
        self._epoll = select.epoll()
        self._epoll.register(self._socket, select.EPOLLIN)
        self._reserve = self._socket.dup()  # see `_turn_away`
        self._identities = count()
        self._by_fd: dict[int, _Connection] = {}
        self._by_identity: dict[bytes, _Connection] = {}  # the same connections
        self._signalled: deque[tuple[int, int]] = deque()

    def fileno(self) -> int:
        return self._epoll.fileno()

    @property
    def num_rejected(self) -> int:
        return self._refused.num

    # -----------------------------------------------------------------------------------------------------------
    # Connections.

    def _accept(self) -> None:
        try:
            sock, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            self._turn_away(error)
            return
        sock.setblocking(False)
        pid, uid = peer_credentials(sock)
        if uid not in self._users or len(self._by_fd) >= MAX_CONNECTIONS:
            is_foreign = uid not in self._users
            why = "another user" if is_foreign else f"{MAX_CONNECTIONS} connections are open"
            self._refused.add(f"user {uid}, process {pid}: {why}")
            sock.close()
            return
        client = KnownClient(f"process {pid}", frozenset(SCOPES), file="")
        connection = _Connection(sock, b"%d" % next(self._identities), client, self._limits)
        self._by_fd[sock.fileno()] = self._by_identity[connection.identity] = connection
        self._epoll.register(sock, select.EPOLLIN)

    def _turn_away(self, error: OSError) -> None:
        """Accepts and closes a connection for which no descriptor is left, with the one in reserve: it would be
        signalled for ever."""
        self._refused.add(error.strerror or str(error))
        self._reserve.close()
        with suppress(OSError):
            self._socket.accept()[0].close()
            self._reserve = self._socket.dup()

    def _drop(self, connection: _Connection) -> None:
        del self._by_fd[connection.socket.fileno()], self._by_identity[connection.identity]
        connection.socket.close()  # which also takes it out of the epoll

    # -----------------------------------------------------------------------------------------------------------
    # Messages.

    def receive(self) -> Incoming | None:
        if not self._signalled:
            self._signalled.extend(self._epoll.poll(0))
        while self._signalled:
            fd, events = self._signalled.popleft()
            connection = self._by_fd.get(fd)
            if fd == self._socket.fileno():
                self._accept()
            elif connection is not None:
                if events & select.EPOLLOUT and not self._write(connection):
                    continue
                if events & ~select.EPOLLOUT and (frame := self._read(connection)) is not None:
                    frames = [frame.message, *(memoryview(buffer) for buffer in frame.buffers)]
                    return Incoming(connection.identity, connection.client, frames)
        return None

    def _read(self, connection: _Connection) -> Frame | None:
        try:
            return connection.reader.read()
        except FrameError:
            self._drop(connection)
            raise
        except (StreamClosed, OSError):
            self._drop(connection)
            return None

    def send(self, identity: bytes, message: bytes, buffers: Sequence[Buffer]) -> str | None:
        connection = self._by_identity.get(identity)
        if connection is None:
            return "the client is gone"
        if connection.writer.num_waiting_bytes > self._limits.buffer_bytes:
            return "the client does not read"
        connection.writer.push(encode_frame(message, buffers, self._limits))
        return None if self._write(connection) else "the client is gone"

    def _write(self, connection: _Connection) -> bool:
        """Writes what the client takes at once, and has the epoll signal when it takes more. False if it is gone."""
        try:
            is_done = connection.writer.write()
        except (StreamClosed, OSError):
            self._drop(connection)
            return False
        self._epoll.modify(connection.socket, select.EPOLLIN | (0 if is_done else select.EPOLLOUT))
        return True

    def close(self, linger_s: float = 0.0) -> None:
        if self._epoll.closed:
            return
        for sock in (self._socket, self._reserve):
            sock.close()  # the name leaves /proc/net/unix
        self._flush(time.monotonic() + linger_s)
        for connection in list(self._by_fd.values()):
            self._drop(connection)
        self._epoll.close()
        self._refused.log()

    def _flush(self, deadline: float) -> None:
        for connection in list(self._by_fd.values()):
            if connection.writer.has_backlog:
                self._epoll.modify(connection.socket, select.EPOLLOUT)
            else:
                self._drop(connection)
        while self._by_fd and (left_s := deadline - time.monotonic()) > 0:
            for fd, _ in self._epoll.poll(left_s):
                connection = self._by_fd[fd]
                try:
                    is_done = connection.writer.write()
                except (StreamClosed, OSError):
                    is_done = True
                if is_done:
                    self._drop(connection)
