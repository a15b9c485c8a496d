"""Administration of a running engine from another process or host: `AdminClient`."""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections.abc import Sequence
from itertools import count
from types import TracebackType
from typing import Any

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from ringcore.config.admin_keys import (
    ClientKeys,
    check_endpoint,
    public_key_of,
    read_client_keys,
    read_key,
    require_curve,
)
from ringcore.engine_core.admin.endpoint import ADMIN_LIMITS, MAX_TIMEOUT_S, set_common_options
from ringcore.errors import ConfigError, EngineDeadError, InvalidRequestError, RingcoreError, RpcTimeoutError
from ringcore.executor.ring_buffer import Buffer
from ringcore.executor.rpc_call import WorkerCall
from ringcore.front_end.client import values_of
from ringcore.front_end.engine_caller import EngineCaller
from ringcore.host.owner_process import OwnerProcess
from ringcore.params.field_checks import check_timeout
from ringcore.protocol.codec import decoder, encoder
from ringcore.protocol.messages import EngineHealth, RpcCall, RpcResult
from ringcore.protocol.methods import RpcMethod
from ringcore.protocol.requests import EngineStats

__all__ = ["AdminClient"]

_TIMEOUT_S = 30.0  # of a call that gives none
_REPLY_GRACE_S = 2.0  # after the call's deadline, which the engine itself enforces unless it hangs
_HEARTBEAT_MS, _HEARTBEAT_TIMEOUT_MS = 1_000, 5_000
_NEVER_MS = 1 << 30  # ZMQ's own value (-1) discards received messages when the connection ends


class AdminClient(EngineCaller):
    """Calls a running engine and its workers, over its admin endpoint.

    endpoint: the engine's `EngineReady.admin_endpoint`. keys: the directory of `ringcore keys`, or a copy with
    server.key and client.key_secret; or the keys themselves, 40 characters each: `server_key`, the engine's public
    one, and `client_secret_key`.

    The constructor connects, within `connect_timeout` seconds. Raises `ConfigError` for invalid arguments and for a key
    that the engine does not know, `EngineDeadError` if no engine listens at the endpoint, `RpcTimeoutError`.

    Every wait has a deadline, 30 s where none is given, and ends when the engine is gone; then this and every later
    call raises `EngineDeadError`. A call whose scope the key lacks raises `PermissionDeniedError`. Thread-safe: the
    calls of several threads are serialized.
    """

    def __init__(
        self,
        endpoint: str,
        keys: str | os.PathLike[str] | None = None,
        *,
        server_key: str | bytes | None = None,
        client_secret_key: str | bytes | None = None,
        connect_timeout: float = 10.0,
    ) -> None:
        check_endpoint("endpoint", endpoint, to_listen=False)
        client_keys = _keys_of(keys, server_key, client_secret_key)
        check_timeout("connect_timeout", connect_timeout, MAX_TIMEOUT_S, or_none=False)
        self._lock = threading.Lock()
        self._call_ids = count()
        self._connection = _Connection(endpoint, client_keys)
        self._finalizer = weakref.finalize(self, self._connection.close)  # also when dropped, and at exit
        try:
            self._connection.wait_connected(connect_timeout)
        except BaseException:
            self.close()
            raise

    def call_workers(self, call: WorkerCall) -> Any:
        if not isinstance(call.method, str):
            raise InvalidRequestError(
                f"method={call.method!r}: an admin client sends no functions; give the name of a worker method",
                field="method",
                value=repr(call.method),
            )
        return super().call_workers(call)

    def methods(self, timeout: float = 5.0) -> list[RpcMethod]:
        """The methods that can be called by name, each with its signature and the scope that a key needs: the engine's
        own (`call_engine`) and those of the workers (`collective_rpc`). Raises as `health`."""
        return msgspec.convert(self.call_engine("methods", timeout=timeout), list[RpcMethod])

    def health(self, timeout: float = 5.0) -> EngineHealth:
        """The engine's health. It answers between steps and while one runs; `RpcTimeoutError` if it does not answer."""
        return msgspec.convert(self.call_engine("health", timeout=timeout), EngineHealth)

    def stats(self, timeout: float = 5.0) -> EngineStats:
        """The scheduler's counts. Raises as `health`."""
        return EngineStats(**self.call_engine("stats", timeout=timeout))

    def _call(self, target: str, call: WorkerCall) -> list[Any]:
        self._connection.owner.check()
        timeout = _TIMEOUT_S if call.timeout_s is None else call.timeout_s
        check_timeout("timeout", timeout, MAX_TIMEOUT_S, or_none=False)
        encoded = call.encoded()
        method, deadline = encoded.method, time.monotonic() + timeout
        if not self._lock.acquire(timeout=timeout):
            raise _timed_out(method, timeout, "other calls of this client were in flight")
        try:
            options = encoded.options() | {"timeout_s": max(0.0, deadline - time.monotonic())}
            message = RpcCall(next(self._call_ids), target, method, **options)
            if not self._connection.send(message, encoded.parts, deadline):
                raise _timed_out(method, timeout, "the engine does not read")
            reply = self._connection.receive(message.call_id, deadline + _REPLY_GRACE_S)
        finally:
            self._lock.release()
        if reply is None:
            raise _timed_out(method, timeout, "no answer of the engine")
        return values_of(*reply, method)

    def close(self) -> None:
        """Disconnects; the engine keeps running. Idempotent; pending and later calls raise `EngineDeadError`. Does
        nothing in a process that was forked from this one, where every other call raises `RingcoreError`."""
        if not self._connection.owner.is_here:
            return
        self._connection.cancel_wait()
        with self._lock:
            self._finalizer()

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Connection:
    """The encrypted connection. It never reconnects: when it ends, the engine has most likely ended too.

    It holds no reference to the client, so that a dropped client can be finalized. `send` and `receive` belong to one
    thread at a time.
    """

    def __init__(self, endpoint: str, keys: ClientKeys) -> None:
        self._endpoint = endpoint
        self.owner = OwnerProcess("the admin client")
        self._encoder, self._decoder = encoder(), decoder(RpcResult)
        self._dead: RingcoreError | None = None
        self._is_connected = False
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._context = zmq.Context()
        try:
            self._connect(keys)
        except BaseException:
            self.close()
            raise

    def _connect(self, keys: ClientKeys) -> None:
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        set_common_options(self._socket, ADMIN_LIMITS)
        self._socket.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        self._socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
        self._socket.setsockopt(zmq.IPV6, int("[" in self._endpoint))
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
            self._socket.connect(self._endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"endpoint={self._endpoint!r}: {error.strerror}; give the endpoint that the engine reports",
                option="endpoint",
                value=repr(self._endpoint),
            ) from error

    def wait_connected(self, timeout_s: float) -> None:
        """Waits for the handshake. Raises the error that ended it, `RpcTimeoutError` after `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        self._check_events()
        while not self._is_connected:
            if not self._events.poll(_milliseconds(deadline)):
                raise _timed_out("connect", timeout_s, f"no engine answers at {self._endpoint}")
            self._check_events()

    def send(self, call: RpcCall, parts: Sequence[Buffer], deadline: float) -> bool:
        """Sends a call; False if it could not be sent before the deadline."""
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

    def receive(self, call_id: int, deadline: float) -> tuple[RpcResult, list[bytes]] | None:
        """The answer to a call; None at the deadline. Drops late answers to earlier calls that timed out."""
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
                self._dead = EngineDeadError(f"the engine sent an unreadable message: {error}", process="engine")
                raise self._error() from error
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
        if self._dead is not None:
            raise self._error()

    def _refused(self) -> ConfigError:
        remedy = "the engine does not know this key; put its public key into clients/ of the engine's admin_keys"
        return ConfigError(f"keys: {remedy}, and restart it", option="keys", value=repr(self._endpoint))

    def _ended(self, how: str) -> EngineDeadError:
        return EngineDeadError(f"the engine at {self._endpoint} {how}", process="engine")

    def _error(self) -> RingcoreError:
        """A fresh copy, since a traceback belongs to one raise."""
        assert self._dead is not None
        return type(self._dead)(self._dead.message, **self._dead.details)

    def cancel_wait(self) -> None:
        """Wakes the waiting thread, whose call then raises `EngineDeadError`."""
        self._dead = self._dead or EngineDeadError("the admin client was closed", process="engine")
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        if not self.owner.is_here:
            return
        wake_fd, self._wake_fd = self._wake_fd, -1
        if wake_fd >= 0:
            self._context.destroy(linger=0)
            os.close(wake_fd)


def _keys_of(
    keys: str | os.PathLike[str] | None, server_key: str | bytes | None, client_secret_key: str | bytes | None
) -> ClientKeys:
    if keys is not None and server_key is None and client_secret_key is None:
        return read_client_keys(keys)
    if keys is not None or server_key is None or client_secret_key is None:
        raise ConfigError(
            "keys: give the directory of 'ringcore keys', or both server_key and client_secret_key",
            option="keys",
            value=repr(keys),
        )
    require_curve("server_key", "...")
    secret = read_key("client_secret_key", client_secret_key)
    return ClientKeys(read_key("server_key", server_key), public_key_of(secret), secret)


def _timed_out(method: str, timeout: float, why: str) -> RpcTimeoutError:
    text = f"{method}: {why} within {timeout} s"
    return RpcTimeoutError(text, method=method, timeout_s=timeout, missing_ranks=[])


def _milliseconds(deadline: float) -> int:
    return max(0, math.ceil((deadline - time.monotonic()) * 1e3))
