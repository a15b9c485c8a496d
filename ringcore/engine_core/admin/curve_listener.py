"""Administration over TCP: encrypted, restricted to known keys, and off by default.

Every connection uses CurveZMQ. Before libzmq delivers a connection's first frame it asks the ZAP handler (RFC 27)
whether the client's public key is one of those in the keys' directory. Without a ZAP handler libzmq refuses every
connection.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import ClassVar

import zmq

from ringcore.config.admin_keys import ServerKeys, read_server_keys
from ringcore.curve.zap_handler import ZapHandler, require_known_key
from ringcore.engine_core.admin.listener import MAX_CALLS_IN_FLIGHT, AdminListener, Incoming
from ringcore.engine_core.transport.framing import Buffer, FrameError, FrameLimits
from ringcore.errors import ConfigError

__all__ = ["CurveListener", "set_common_options"]

_CURVE_BYTES = 1 << 10  # upper bound of what encryption adds to a frame
# Per direction: beyond it the endpoint stops reading a connection (back-pressure), or drops replies to a client that
# does not read.
_HIGH_WATER_MARK = MAX_CALLS_IN_FLIGHT
_HANDSHAKE_MS = 10_000
_KEEPALIVE_S, _NUM_KEEPALIVES = 1, 4  # a host that is gone, with nothing sent to it, is noticed after 5 s


class CurveListener(AdminListener):
    """A ZeroMQ ROUTER. `address` is the endpoint with the port that was picked. `fileno` is edge-triggered: poll it
    only after `receive` returned None and while `has_messages` is False, also after a `send`.

    Raises `ConfigError` for unusable keys and for an address that cannot be bound.
    """

    is_edge_triggered: ClassVar[bool] = True

    def __init__(self, endpoint: str, keys: str, limits: FrameLimits) -> None:
        server = read_server_keys(keys)
        self._clients = server.clients
        self._context = zmq.Context()
        self._zap_handler = ZapHandler(
            self._context, server.clients, "the admin endpoint"
        )  # before the first connection
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        try:
            self._listen(endpoint, server, limits)
        except BaseException:
            self.close()
            raise
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def _listen(self, endpoint: str, server: ServerKeys, limits: FrameLimits) -> None:
        set_common_options(self._socket, limits)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to a client that is gone or does not read raises
        require_known_key(self._socket, server.secret)
        self._socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise _cannot_listen(endpoint, error) from error

    def fileno(self) -> int:
        return int(self._socket.getsockopt(zmq.FD))

    @property
    def has_messages(self) -> bool:
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    @property
    def num_rejected(self) -> int:
        """Connections refused because their key is unknown."""
        return self._zap_handler.num_rejected

    def receive(self) -> Incoming | None:
        try:
            identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        try:
            client = self._clients[str(frames[0].get("User-Id")).encode()]
        except (LookupError, zmq.ZMQError) as error:
            raise FrameError(f"frames without a client: {error!r}") from error
        return Incoming(identity.bytes, client, [frame.buffer for frame in frames])

    def send(self, identity: bytes, message: bytes, buffers: Sequence[Buffer]) -> str | None:
        try:
            self._socket.send_multipart([identity, message, *buffers], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EAGAIN, errno.EHOSTUNREACH):
                raise
            return "the client does not read" if error.errno == errno.EAGAIN else "the client is gone"
        return None

    def close(self, linger_s: float = 0.0) -> None:
        if not self._socket.closed:
            self._socket.close(linger=round(linger_s * 1e3))
            self._context.term()  # ends the ZAP handler's thread and waits for its socket
            self._zap_handler.join()


def set_common_options(socket: zmq.Socket[bytes], limits: FrameLimits) -> None:
    """Socket options of both ends: bounds on a frame, the queues and a handshake; closing does not linger.

    TCP's keepalives notice a host that is gone. ZeroMQ's heartbeats must not be used beside bounded queues: a full one
    stops libzmq (4.3.5) reading its connection, and if the peer ends then, the next heartbeat of either end is written
    to what is closed, and libzmq aborts the process: the engine's, killed by a client.
    """
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, max(limits.message_bytes, limits.buffer_bytes) + _CURVE_BYTES)
    socket.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _KEEPALIVE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, _KEEPALIVE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, _NUM_KEEPALIVES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)


def _cannot_listen(endpoint: str, error: zmq.ZMQError) -> ConfigError:
    remedies = {
        errno.EADDRINUSE: "the port is in use; give another one, or 0 to have one picked",
        errno.EACCES: "this user may not listen there; give a port above 1023, or 0 to have one picked",
    }
    no_such = f"cannot listen there ({error.strerror}); give an address of this host, e.g. 127.0.0.1"
    remedy = remedies.get(error.errno or 0, no_such)
    return ConfigError(f"admin_endpoint={endpoint!r}: {remedy}", option="admin_endpoint", value=repr(endpoint))
