"""The encrypted connection of an `AdminClient` over TCP."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from ringcore.config.admin_keys import ClientKeys
from ringcore.engine_core.admin.curve_listener import set_common_options
from ringcore.engine_core.admin.listener import ADMIN_LIMITS
from ringcore.engine_core.transport.framing import Buffer
from ringcore.errors import ConfigError, InvalidRequestError
from ringcore.front_end.admin_connection import AdminConnection
from ringcore.protocol.codec import decoder, encoder
from ringcore.protocol.messages import RpcCall, RpcResult

__all__ = ["CurveConnection"]

_NEVER_MS = 1 << 30  # ZMQ's own value (-1) discards received messages when the connection ends


class CurveConnection(AdminConnection):
    """A ZeroMQ DEALER behind CurveZMQ. Raises `ConfigError` for an endpoint that ZeroMQ cannot use."""

    def __init__(self, endpoint: str, keys: ClientKeys) -> None:
        super().__init__(endpoint)
        self._encoder, self._decoder = encoder(), decoder(RpcResult)
        self._is_connected = False
        self._context = zmq.Context()
        try:
            self._connect(endpoint, keys)
        except BaseException:
            self.close()
            raise

    def _connect(self, endpoint: str, keys: ClientKeys) -> None:
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        set_common_options(self._socket, ADMIN_LIMITS)
        self._socket.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
        self._socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        self._socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        self._events: zmq.Socket[bytes] = self._socket.get_monitor_socket()
        self._in = zmq.Poller()
        self._out = zmq.Poller()
        for poller, direction in ((self._in, zmq.POLLIN), (self._out, zmq.POLLOUT)):
            poller.register(self._socket, direction)
            poller.register(self._events, zmq.POLLIN)
            poller.register(self._wake_fd, zmq.POLLIN)
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"endpoint={endpoint!r}: {error.strerror}; give the endpoint that the engine reports",
                option="endpoint",
                value=repr(endpoint),
            ) from error

    def wait_connected(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        self._check_events()
        while not self._is_connected:
            if not self._events.poll(_milliseconds(deadline)):
                return False
            self._check_events()
        return True

    def send(self, call: RpcCall, parts: Sequence[Buffer], deadline: float) -> bool:
        body = self._encoder.encode(call)
        limit_error = ADMIN_LIMITS.limit_error(len(body), len(parts), sum(map(len, parts)))
        if limit_error is not None:
            raise InvalidRequestError(f"args: {limit_error}; send less per call", field="args", value=call.method)
        while True:
            self._check_events()
            try:
                self._socket.send_multipart([body, *parts], zmq.NOBLOCK)
            except zmq.Again:
                if time.monotonic() >= deadline:
                    return False
                self._out.poll(_milliseconds(deadline))
            else:
                return True

    def receive(self, call_id: int, deadline: float) -> tuple[RpcResult, Sequence[Buffer]] | None:
        while True:
            try:
                body, *parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                self._check_events()  # after the received messages: the connection may have ended since
                if time.monotonic() >= deadline:
                    return None
                self._in.poll(_milliseconds(deadline))
                continue
            try:
                result: RpcResult = self._decoder.decode(body)
            except (msgspec.MsgspecError, ValueError) as error:
                self._dead = self._unreadable(error)
                self._check()
            if result.call_id == call_id:
                return result, parts

    def _check_events(self) -> None:
        """Processes the socket's monitor events; raises if the connection has ended."""
        while self._dead is None and self._events.poll(0):
            event = recv_monitor_message(self._events)
            match event["event"]:
                case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._is_connected = True
                case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                    self._dead = self._refused()
                case zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                    text = "ended the handshake: the server key may be that of another engine, or the engine has ended"
                    self._dead = self._ended(text)
                case zmq.EVENT_DISCONNECTED:
                    self._dead = self._ended("closed the connection: it has ended, or could not read a message")
                case zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED:
                    self._dead = self._ended("is not running: nothing listens at this address")
        self._check()

    def _refused(self) -> ConfigError:
        remedy = "the engine does not know this key; put its public key into clients/ of the engine's admin_keys"
        return ConfigError(f"keys: {remedy}, and restart it", option="keys", value=repr(self.shown))

    def _disconnect(self) -> None:
        self._context.destroy(linger=0)


def _milliseconds(deadline: float) -> int:
    return max(0, math.ceil((deadline - time.monotonic()) * 1e3))
