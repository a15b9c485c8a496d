"""Administration of a running engine from another process or host: `AdminClient`."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from itertools import count
from types import TracebackType
from typing import Any

import msgspec

from ringcore.config.admin_keys import (
    ClientKeys,
    check_endpoint,
    public_key_of,
    read_client_keys,
    read_key,
    require_curve,
)
from ringcore.engine_core.admin.endpoint import MAX_TIMEOUT_S
from ringcore.engine_core.admin.public_methods import ENGINE_CALLS
from ringcore.errors import ConfigError, InvalidRequestError, RpcTimeoutError
from ringcore.executor.rpc_call import WorkerCall
from ringcore.front_end.admin_connection import AdminConnection
from ringcore.front_end.client import values_of
from ringcore.front_end.engine_caller import EngineCaller
from ringcore.front_end.local_connection import LocalConnection
from ringcore.front_end.local_engines import LocalEngine, find_engine
from ringcore.params.field_checks import check_timeout
from ringcore.protocol.messages import EngineHealth, RpcCall
from ringcore.protocol.methods import RpcMethod
from ringcore.protocol.requests import EngineStats

__all__ = ["AdminClient"]

_TIMEOUT_S = 30.0  # of a call that gives none
_REPLY_GRACE_S = 2.0  # after the call's deadline, which the engine itself enforces unless it hangs


class AdminClient(EngineCaller):
    """Calls a running engine and its workers.

    `AdminClient.local()` finds an engine of this user on this host. `AdminClient(endpoint, keys)` connects to any
    engine's admin endpoint over TCP. endpoint: the engine's `EngineReady.admin_endpoint`. keys: the directory of
    `ringcore keys`, or a copy with server.key and client.key_secret; or the keys themselves, 40 characters each:
    `server_key`, the engine's public one, and `client_secret_key`.

    Both connect, within `connect_timeout` seconds. Raises `ConfigError` for invalid arguments and for a key that the
    engine does not know, `EngineDeadError` if no engine listens at the endpoint, `RpcTimeoutError`.

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
        from ringcore.front_end.curve_connection import CurveConnection  # imports ZeroMQ, which `local` does not need

        self._open(lambda: CurveConnection(endpoint, client_keys), connect_timeout)

    @classmethod
    def local(cls, engine: LocalEngine | str | int | None = None, *, connect_timeout: float = 10.0) -> AdminClient:
        """A client of an engine of this user on this host, over its private socket; it may make every call.

        engine: the pid of the engine process, the beginning of the engine's id, its model (name, path, or the last part
        of it), or one of `local_engines()`; None: the only one. An engine that is starting accepts clients, and answers
        once it is ready.

        Raises `InvalidRequestError`, which names the candidates, unless exactly one engine is meant;
        `PermissionDeniedError` for an engine of another user.
        """
        found = engine if isinstance(engine, LocalEngine) else find_engine(engine)
        client = cls.__new__(cls)
        client._open(lambda: LocalConnection(found.name), connect_timeout)
        return client

    def _open(self, make_connection: Callable[[], AdminConnection], connect_timeout: float) -> None:
        check_timeout("connect_timeout", connect_timeout, MAX_TIMEOUT_S, or_none=False)
        self._lock = threading.Lock()
        self._call_ids = count()
        self._connection = make_connection()
        self._finalizer = weakref.finalize(self, self._connection.close)  # also when dropped, and at exit
        try:
            if not self._connection.wait_connected(connect_timeout):
                raise _timed_out("connect", connect_timeout, f"no engine answers at {self._connection.shown}")
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
            is_answered_at_once = target == "engine" and method in ENGINE_CALLS
            grace_s = 0.0 if is_answered_at_once else _REPLY_GRACE_S
            reply = self._connection.receive(message.call_id, deadline + grace_s)
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
