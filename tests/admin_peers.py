"""Both ends of an admin connection for tests: keys, a client that may misbehave, and an engine without workers."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import threading
import time
from pathlib import Path

import pytest
import zmq

from ringcore.config.admin_keys import create_keys, read_client_keys
from ringcore.engine_core.admin.curve_listener import CurveListener
from ringcore.engine_core.admin.endpoint import AdminEndpoint
from ringcore.engine_core.admin.listener import admin_limits
from ringcore.engine_core.admin.local_listener import LocalListener
from ringcore.engine_core.admin.local_name import LocalName
from ringcore.engine_core.admin.public_methods import PublicMethods
from ringcore.engine_core.core import EngineCore
from ringcore.engine_core.transport.frame_reader import FrameReader
from ringcore.engine_core.transport.framing import FrameLimits, StreamClosed, encode_frame
from ringcore.errors import WorkerError
from ringcore.executor.value_codec import decode_request, encode_request, encode_value
from ringcore.protocol.codec import decoder, encoder
from ringcore.protocol.messages import RpcCall, RpcResult
from ringcore.protocol.scopes import SCOPES
from ringcore.protocol.wire_errors import wire_error
from ringcore.worker.rpc import rpc, rpc_methods


class EchoWorker:
    """What the workers of an `EchoEngine` declare."""

    @rpc
    def echo(self, *args: object, **kwargs: object) -> object: ...

    @rpc
    def slow(self) -> object: ...

    @rpc
    def fail(self) -> None:
        """Raises an error of rank 1."""

    @rpc(read_only=True)
    def look(self) -> object: ...

    @rpc(scope="lifecycle")
    def join(self) -> object: ...

    @rpc(scope="engine")
    def shutdown(self) -> object: ...


METHODS = PublicMethods(EngineCore, lambda: rpc_methods(EchoWorker()))
ANY_PORT = "tcp://127.0.0.1:0"
WAIT_S = 90.0
SILENCE_S = 0.3  # in which nothing may come
NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def make_keys(folder: Path, *scopes: str) -> str:
    return str(create_keys(folder / "admin-keys", scopes or SCOPES))


def open_endpoint(keys: str | None, num_ranks: int = 1, limits: FrameLimits | None = None, name=None) -> AdminEndpoint:
    """Over TCP with these keys; None: the private socket of this name."""
    limits = limits or admin_limits(num_ranks)
    listener = LocalListener(name or local_name(), limits) if keys is None else CurveListener(ANY_PORT, keys, limits)
    endpoint = AdminEndpoint([listener], limits)
    endpoint.serve(METHODS)
    return endpoint


def local_name() -> LocalName:
    """Of one more engine in this process."""
    return LocalName(os.geteuid(), os.getpid(), secrets.token_hex(4))


class LocalPeer:
    """A client that sends what it is told to."""

    def __init__(self, name) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.connect(name.address)
        self.socket.setblocking(False)
        self.reader = FrameReader(self.socket, FrameLimits())

    def send_bytes(self, data: bytes) -> None:
        self.socket.settimeout(WAIT_S)
        self.socket.sendall(data)
        self.socket.setblocking(False)

    def send(self, message: bytes, *buffers: bytes) -> None:
        self.send_bytes(b"".join(encode_frame(message, buffers, FrameLimits())))

    def call(self, call: RpcCall, *args) -> None:
        parts = encode_request(call.method, args, None) if call.target == "workers" else []
        self.send(encoder().encode(call), *parts)

    def receive(self, timeout_s: float = WAIT_S) -> tuple[RpcResult, list[bytes]] | None:
        """Raises `StreamClosed` once the engine has closed the connection."""
        while (frame := self.reader.read()) is None:
            if not select.select([self.socket], [], [], timeout_s)[0]:
                return None
        return decoder(RpcResult).decode(frame.message), [bytes(buffer) for buffer in frame.buffers]

    def is_closed(self) -> bool:
        try:
            return self.receive() is not None and False
        except StreamClosed:
            return True

    def close(self) -> None:
        self.socket.close()

    def __enter__(self):
        return self

    def __exit__(self, *exc) -> None:
        self.close()


class RawPeer:
    """A DEALER that sends what it is told to. `keys` None: no encryption; `secret`, `server`: others than theirs."""

    def __init__(self, address: str, keys: str | None, secret=None, server=None, waiting: int = 1000) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RECONNECT_IVL, 86_400_000)
        self.socket.setsockopt(zmq.RCVHWM, waiting)
        self.socket.setsockopt(zmq.SNDTIMEO, round(WAIT_S * 1e3))
        self.socket.setsockopt(zmq.RCVTIMEO, round(WAIT_S * 1e3))
        if keys is not None:
            own = read_client_keys(keys)
            self.socket.curve_serverkey = server or own.server
            self.socket.curve_secretkey = secret or own.secret
            self.socket.curve_publickey = zmq.curve_public(secret or own.secret)
        self.socket.connect(address)

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def call(self, call: RpcCall, *args) -> None:
        parts = encode_request(call.method, args, None) if call.target == "workers" else []
        self.send(encoder().encode(call), *parts)

    def knock(self, call: RpcCall) -> None:
        """`call`, where the connection may have been refused already."""
        with contextlib.suppress(zmq.Again):
            self.socket.setsockopt(zmq.SNDTIMEO, 0)
            self.call(call)

    def receive(self, timeout_s: float = WAIT_S) -> tuple[RpcResult, list[bytes]] | None:
        if not self.socket.poll(timeout_s * 1e3):
            return None
        body, *parts = self.socket.recv_multipart()
        return decoder(RpcResult).decode(body), parts

    def close(self) -> None:
        self.context.destroy(linger=0)

    def __enter__(self):
        return self

    def __exit__(self, *exc) -> None:
        self.close()


class EchoEngine:
    """Serves an `AdminEndpoint` in a thread, as the engine's loop does. The two ranks of the method "echo" return their
    rank and its arguments, and so do "slow", when `release` is set, and the others; "fail" is an error."""

    def __init__(self, keys: str, health=None, stats=None) -> None:
        self.endpoint = open_endpoint(keys, num_ranks=2)
        self.address = self.endpoint.address
        self.release = threading.Event()
        self.calls: list[RpcCall] = []
        self.error = None  # what `stop` tells those who wait
        self._engine_values = {"health": health, "stats": stats, "methods": METHODS.listing(), "pause": None}
        self._held = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopping.is_set():
            while (received := self.endpoint.receive()) is not None:
                self.calls.append(received.call)
                self._held.append(received) if received.call.method == "slow" else self._answer(received)
            if self.release.is_set():
                while self._held:
                    self._answer(self._held.pop())
            time.sleep(0.002)
        if self.error is not None:
            self.endpoint.fail(wire_error(self.error))
        self.endpoint.close(1.0)

    def _answer(self, received) -> None:
        caller, call, parts = received
        try:
            values = self._values(call, parts)
        except Exception as error:
            return self.endpoint.send(caller, RpcResult(call.call_id, error=wire_error(error)))
        encoded = [encode_value(value) for value in values]
        result = RpcResult(call.call_id, [len(one) for one in encoded])
        return self.endpoint.send(caller, result, [part for one in encoded for part in one])

    def _values(self, call: RpcCall, parts):
        if call.target == "engine":
            return [self._engine_values[call.method]]
        if call.method == "fail":
            raise WorkerError("KeyError: 'x'", rank=1, traceback="Traceback: here")
        _, args, kwargs = decode_request(parts)
        values = [[rank, args, kwargs] for rank in range(2)]
        return values if call.unique_reply_rank is None else [values[call.unique_reply_rank]]

    def stop(self, error=None) -> None:
        self.error = error
        self._stopping.set()
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    def __enter__(self):
        return self

    def __exit__(self, *exc) -> None:
        self.stop()


def echo(call_id=1, timeout_s=60.0, **fields):
    return RpcCall(call_id, "workers", "echo", timeout_s=timeout_s, **fields)


def receive(endpoint, timeout_s=WAIT_S):
    """The next call, waited for as the engine's loop waits."""
    poll = select.poll()
    for fd in endpoint.fds:
        poll.register(fd, select.POLLIN)
    deadline = time.monotonic() + timeout_s
    while (call := endpoint.receive()) is None:
        if time.monotonic() > deadline:
            return None
        if not endpoint.has_messages:
            poll.poll(max(0.0, deadline - time.monotonic()) * 1e3)
    return call


def served(endpoint, peer, call_id=1000) -> bool:
    """Whether a well-formed call gets through, and its answer back."""
    peer.call(echo(call_id), "x")
    got = receive(endpoint)
    assert got.call.call_id == call_id
    endpoint.send(got.caller, RpcResult(call_id, [1]), encode_value("y"))
    result, parts = peer.receive()
    return (result.call_id, parts) == (call_id, encode_value("y"))


def wait_until(condition) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
