"""The socket between a client and its engine process, and the handshake that makes it private.

    client                                        engine process
    mkdtemp (0700), nonce
    starts the engine process ──────────────────▶ binds ROUTER at ipc://DIRECTORY/engine
    DEALER "tx"+nonce  ──hello──────────────────▶ waits for both hellos,
    DEALER "rx"+nonce  ──hello──────────────────▶ then unlinks the socket and DIRECTORY
    DEALER tx          ──ClientMessage──────────▶ ROUTER
    DEALER rx          ◀──EngineMessage────────── ROUTER

The client has a socket for each direction because a ZMQ socket belongs to one thread at a time: one thread may
wait for outputs while another sends. Once connected nothing of it has a name, so that nobody can join and a
killed engine leaves nothing behind. Messages are the typed msgpack of `protocol`; a frame that is not one, or that
comes from anybody without the nonce, is counted and dropped.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import threading
import time
from collections import deque
from pathlib import Path

import msgspec
import zmq

from ringcore.errors import EngineDeadError, InvalidRequestError
from ringcore.protocol import ClientMessage, EngineMessage, decoder, encoder

__all__ = ["MAX_MESSAGE_BYTES", "ClientChannel", "EngineChannel"]

MAX_MESSAGE_BYTES = 64 << 20
_MAX_SOCKET_PATH = 100  # sockaddr_un holds 107 bytes
_HELLO = b""
_RECONNECT_MS = 10  # the client connects before the engine has bound


def _options(socket: zmq.Socket[bytes]) -> None:
    """No linger, so that closing never waits; no high-water mark, because a ROUTER drops what is above it.

    What can wait in the queues is bounded by the requests that this one client has sent, and their tokens.
    """
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)


class EngineChannel:
    """The engine's end: one ROUTER, polled by the engine's loop through `socket`."""

    def __init__(self, endpoint: str, nonce: bytes) -> None:
        self._path = Path(endpoint.removeprefix("ipc://"))
        self._tx, self._rx = b"tx" + nonce, b"rx" + nonce
        self._encoder, self._decoder = encoder(), decoder(ClientMessage)
        self._early: deque[list[bytes]] = deque()  # came before both hellos: the client need not wait for those
        self.num_dropped = 0  # frames from strangers, and frames that were no ClientMessage
        self._context = zmq.Context()
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        _options(self.socket)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a client that is gone is an error, not silence
        self.socket.bind(endpoint)

    def wait_for_client(self, timeout_s: float) -> None:
        """Waits for the client's two hellos and removes the socket's name. Raises `EngineDeadError` at the deadline."""
        deadline = time.monotonic() + timeout_s
        missing = {self._tx, self._rx}
        while missing:
            left_ms = max(0, round((deadline - time.monotonic()) * 1000))
            if not self.socket.poll(left_ms):
                raise EngineDeadError(f"no client connected within {timeout_s} s", process="engine")
            message = self.socket.recv_multipart()
            if message[0] in missing and message[1:] == [_HELLO]:
                missing.remove(message[0])
            else:
                self._early.append(message)
        shutil.rmtree(self._path.parent, ignore_errors=True)

    def receive(self) -> ClientMessage | None:
        """The next message that has arrived; never blocks."""
        while True:
            try:
                sender, *frames = self._early.popleft() if self._early else self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            if sender == self._tx and len(frames) == 1:
                try:
                    message: ClientMessage = self._decoder.decode(frames[0])
                except (msgspec.MsgspecError, ValueError):
                    pass
                else:
                    return message
            self.num_dropped += 1

    def send(self, message: EngineMessage) -> None:
        """Sends a message. Raises what encoding raises, or `ValueError` above `MAX_MESSAGE_BYTES`; nothing is sent."""
        body = self._encoder.encode(message)
        if len(body) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {len(body)} bytes is above the limit of {MAX_MESSAGE_BYTES}")
        self.socket.send_multipart([self._rx, body])

    def close(self, linger_s: float = 0.0) -> None:
        """Closes the socket; what was sent last has `linger_s` seconds to leave."""
        self._context.destroy(linger=round(linger_s * 1000))
        shutil.rmtree(self._path.parent, ignore_errors=True)


class ClientChannel:
    """The client's end. `send` is thread-safe; `receiver` belongs to one thread at a time."""

    def __init__(self) -> None:
        self.directory = _private_directory()
        self.endpoint = f"ipc://{self.directory}/engine"
        self.nonce = secrets.token_bytes(16)
        self._encoder, self._decoder = encoder(), decoder(EngineMessage)
        self._send_lock = threading.Lock()
        self._context = zmq.Context()
        self._sender = self._connect(b"tx")
        self.receiver = self._connect(b"rx")

    def _connect(self, direction: bytes) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        _options(socket)
        socket.setsockopt(zmq.ROUTING_ID, direction + self.nonce)
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        socket.connect(self.endpoint)
        socket.send(_HELLO)
        return socket

    def send(self, message: ClientMessage) -> None:
        """Sends a message; never blocks. Raises `InvalidRequestError` for what cannot be encoded or is too long."""
        try:
            body = self._encoder.encode(message)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise InvalidRequestError(f"cannot be sent to the engine: {error}", field="message", value=None) from error
        if len(body) > MAX_MESSAGE_BYTES:
            raise InvalidRequestError(
                f"a message of {len(body)} bytes is above the limit of {MAX_MESSAGE_BYTES}; send less at once",
                field="message",
                value=len(body),
            )
        with self._send_lock:
            if not self._sender.closed:
                self._sender.send(body)

    def receive(self) -> EngineMessage | None:
        """The next message that has arrived; never blocks. Raises `EngineDeadError` for one that cannot be read."""
        try:
            body = self.receiver.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None
        try:
            message: EngineMessage = self._decoder.decode(body)
        except (msgspec.MsgspecError, ValueError) as error:
            raise EngineDeadError(f"the engine sent an unreadable message: {error}", process="engine") from error
        return message

    def close(self) -> None:
        """Idempotent. Nobody may be waiting on `receiver`."""
        with self._send_lock:
            self._context.destroy(linger=0)
        shutil.rmtree(self.directory, ignore_errors=True)


def _private_directory() -> str:
    """A new directory that only this user can enter, with a path short enough for a socket."""
    directory = tempfile.mkdtemp(prefix="ringcore-")  # mkdtemp makes it 0700
    if len(os.fsencode(directory)) <= _MAX_SOCKET_PATH - len("/engine"):
        return directory
    os.rmdir(directory)
    return tempfile.mkdtemp(prefix="ringcore-", dir="/tmp")
