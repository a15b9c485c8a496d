"""The connection of an `AdminClient` to the private socket of an engine on this host."""

from __future__ import annotations

import math
import os
import select
import socket
import time
from collections.abc import Sequence

from ringcore.engine_core.admin.listener import ADMIN_LIMITS
from ringcore.engine_core.admin.local_name import LocalName, peer_credentials
from ringcore.engine_core.transport.channel import ClientChannel, StreamClosed
from ringcore.engine_core.transport.framing import Buffer, FrameLimits
from ringcore.errors import EngineDeadError, PermissionDeniedError
from ringcore.front_end.admin_connection import AdminConnection
from ringcore.protocol.messages import RpcCall, RpcResult

__all__ = ["LocalConnection", "connect"]

_MAX_RANKS = 1 << 12  # of which a reply has buffers
_LIMITS = FrameLimits(
    ADMIN_LIMITS.message_bytes, ADMIN_LIMITS.buffer_bytes, num_buffers=ADMIN_LIMITS.num_buffers * _MAX_RANKS
)
_RETRY_S = 0.02  # while as many connections wait as the engine's socket takes


def connect(name: LocalName) -> socket.socket:
    """A socket that is connected to the engine's listening one, whether the engine runs or hangs.

    Raises `PermissionDeniedError` if another user listens under this name, or the engine would not let this user in;
    `BlockingIOError` if too many connections wait already, `OSError` if the engine is gone.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        sock.connect(name.address)
        _check_user(name, peer_credentials(sock).uid)
    except BaseException:
        sock.close()
        raise
    return sock


def _check_user(name: LocalName, uid: int) -> None:
    if uid != name.uid:
        text = f"the socket {name} belongs to user {uid}, and not to the engine of user {name.uid}: not an engine"
    elif os.geteuid() not in (0, uid):
        text = f"the engine {name.pid} belongs to user {uid}, and this process to user {os.geteuid()}; call as {uid}"
    else:
        return
    raise PermissionDeniedError(text, method="connect", scope="read", key=f"user {os.geteuid()}", file="")


class LocalConnection(AdminConnection):
    """`ClientChannel` over that socket: the engine's end is another process's, and a frame looks the same."""

    def __init__(self, name: LocalName) -> None:
        super().__init__(f"process {name.pid}")
        self._name = name
        self._poll = select.poll()
        self._poll.register(self._wake_fd, select.POLLIN)
        self._channel: ClientChannel | None = None

    def wait_connected(self, timeout_s: float) -> bool:
        """Raises `EngineDeadError` if the engine is gone, and as `connect`. An engine that hangs still lets clients in,
        up to a number."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                sock = connect(self._name)
            except PermissionDeniedError:  # an OSError too
                raise
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    return False
                time.sleep(_RETRY_S)
            except OSError as error:
                raise self._ended("is not running: nothing listens there") from error
            else:
                self._channel = ClientChannel(sock, self._wake_fd, self._wake_fd, _LIMITS)
                self._poll.register(sock, select.POLLIN)
                return True

    def send(self, call: RpcCall, parts: Sequence[Buffer], deadline: float) -> bool:
        self._check()
        assert self._channel is not None, "wait_connected comes first"
        try:
            self._channel.send(call, parts, deadline)
        except TimeoutError:
            return False
        except StreamClosed:
            self._end(self._closed())
        return True

    def receive(self, call_id: int, deadline: float) -> tuple[RpcResult, Sequence[Buffer]] | None:
        assert self._channel is not None, "wait_connected comes first"
        while True:
            try:
                received = self._channel.receive()
            except StreamClosed:
                self._end(self._closed())
            except EngineDeadError as error:
                self._end(error)
            else:
                match received:
                    case (RpcResult() as result, buffers) if result.call_id == call_id:
                        return result, buffers
                    case None:
                        self._check()
                        if time.monotonic() >= deadline:
                            return None
                        self._poll.poll(max(0, math.ceil((deadline - time.monotonic()) * 1e3)))

    def _end(self, error: EngineDeadError) -> None:
        self._dead = self._dead or error
        self._check()

    def _closed(self) -> EngineDeadError:
        return self._ended("closed the connection: it has ended, or could not read a message")

    def _disconnect(self) -> None:
        if self._channel is not None:
            self._channel.close()
