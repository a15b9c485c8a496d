"""The connection between a client and its engine process: one socketpair, of which the engine inherits an end.

    client                                        engine process
    socketpair, starts the engine with an end ──▶ EngineChannel
    ClientChannel ──ClientMessage──────────────▶
                  ◀──────────────EngineMessage──

The socket has no name: no other process can connect, and a killed process leaves no file. Each message is a frame
(`framing`) with the typed msgpack of `protocol`, followed by the buffers of an `RpcCall` or `RpcResult`. The receiver
counts and drops a frame whose message does not decode; bytes that are not a frame end the stream.

The engine never waits for its client to read: bytes that the socket does not accept stay in the engine's backlog, which
is bounded by the requests of this one client. So a client that blocks in a write always has an engine that reads.
"""

from __future__ import annotations

import logging
import math
import select
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from ringcore.engine_core.transport.frame_reader import FrameReader
from ringcore.engine_core.transport.framing import (
    MAX_BUFFER_BYTES,
    MAX_MESSAGE_BYTES,
    Buffer,
    Frame,
    FrameError,
    FrameLimits,
    FrameWriter,
    StreamClosed,
    encode_frame,
    recorded,
)
from ringcore.errors import EngineDeadError, InvalidRequestError
from ringcore.protocol.codec import decoder, encoder
from ringcore.protocol.messages import ClientMessage, EngineMessage, RpcCall, RpcResult

__all__ = [
    "MAX_BUFFER_BYTES",
    "MAX_MESSAGE_BYTES",
    "ClientChannel",
    "EngineChannel",
    "FrameLimits",
    "Received",
    "StreamClosed",
    "channel_pair",
]

M = TypeVar("M")

_SOCKET_BYTES = 1 << 20  # fewer system calls for a large message; the kernel may grant less
_BYTES_PER_READ = 4 << 20  # by the engine: reading a large message must not delay the workers' next step
_LOG_EVERY_S = 1.0

_log = logging.getLogger(__name__)


class Received(NamedTuple, Generic[M]):
    """A message and its buffers."""

    message: M
    buffers: list[bytearray]


def channel_pair() -> tuple[socket.socket, socket.socket]:
    """The client's end and the engine's; neither is inherited unless it is passed on."""
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
    return pair


class _Inbox(Generic[M]):
    """Reads messages of one type from a socket."""

    def __init__(self, reader: FrameReader, kind: Any) -> None:
        self._reader = reader
        self._decoder = decoder(kind)
        self.num_dropped = 0
        self._num_logged = 0
        self._logged_s = -math.inf

    def receive(self) -> Received[M] | None:
        """The next complete message, or None; never blocks. Raises `StreamClosed` and `FrameError`."""
        while (frame := self._reader.read()) is not None:
            try:
                return Received(self._decode(frame), frame.buffers)
            except Exception as error:  # any error that decoding foreign bytes can raise
                self._drop(error)
        return None

    def _decode(self, frame: Frame) -> M:
        message: M = self._decoder.decode(frame.message)
        if frame.buffers and not isinstance(message, RpcCall | RpcResult):
            raise ValueError(f"{len(frame.buffers)} buffers with a {type(message).__name__}, which has none")
        return message

    def _drop(self, error: Exception) -> None:
        self.num_dropped += 1
        now = time.monotonic()
        if now - self._logged_s >= _LOG_EVERY_S:
            num_new = self.num_dropped - self._num_logged
            _log.warning("dropped %d unreadable messages, the last one for: %s", num_new, error)
            self._logged_s, self._num_logged = now, self.num_dropped


class EngineChannel:
    """The engine's end, polled by the engine's loop: for reading, and for writing while it `has_backlog`.

    `num_dropped` counts frames that did not decode as a `ClientMessage`. Owns the descriptor. One thread at a time.
    """

    def __init__(self, fd: int, limits: FrameLimits | None = None) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.setblocking(False)
        self._limits = limits or FrameLimits()
        self._encoder = encoder()
        self._inbox: _Inbox[ClientMessage] = _Inbox(
            FrameReader(self._socket, self._limits, _BYTES_PER_READ), ClientMessage
        )
        self._writer = FrameWriter(self._socket)

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def num_dropped(self) -> int:
        return self._inbox.num_dropped

    @property
    def has_backlog(self) -> bool:
        """Whether unsent bytes wait until the client reads."""
        return self._writer.has_backlog

    def receive(self) -> Received[ClientMessage] | None:
        """The next message that has arrived; never blocks.

        Raises `StreamClosed` once the client is gone, and after bytes that are not a frame.
        """
        try:
            return self._inbox.receive()
        except FrameError as error:
            _log.error("the client's stream cannot be read any more: %s", error)
            raise StreamClosed from error

    def send(self, message: EngineMessage, buffers: Sequence[Buffer] = ()) -> None:
        """Sends a message; never blocks. The buffers must not be changed afterwards.

        Raises what encoding raises, or `ValueError` above a limit; then nothing is sent. `receive` reports a client
        that is gone.
        """
        self._writer.push(encode_frame(self._encoder.encode(message), buffers, self._limits))
        self.flush()

    def flush(self, timeout_s: float = 0.0) -> None:
        """Writes the backlog, as far as the client reads it within `timeout_s` seconds."""
        deadline = time.monotonic() + timeout_s
        poll = None
        try:
            while not self._writer.write():
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return
                if poll is None:
                    poll = select.poll()
                    poll.register(self._socket, select.POLLOUT)
                poll.poll(_milliseconds(left_s))
        except StreamClosed:
            self._writer.clear()

    def close(self, linger_s: float = 0.0) -> None:
        """Closes the socket after at most `linger_s` seconds to write the backlog. Idempotent."""
        if self._socket.fileno() >= 0:
            self.flush(linger_s)
            self._socket.close()


class ClientChannel:
    """The client's end. `send` is thread-safe; `receive` belongs to one thread at a time.

    engine_fd: a descriptor that becomes readable when the engine process ends. closing_fd: one that becomes readable
    when this client closes; both wake a blocked `send`. `num_dropped` counts frames that did not decode as an
    `EngineMessage`. Owns the socket only.
    """

    def __init__(self, sock: socket.socket, engine_fd: int, closing_fd: int, limits: FrameLimits | None = None) -> None:
        self._socket = sock
        self._socket.setblocking(False)
        self._wakeup_fds = (engine_fd, closing_fd)
        self._limits = limits or FrameLimits()
        self._encoder = encoder()
        self.reader = FrameReader(sock, self._limits, reads_ahead=True)
        self._inbox: _Inbox[EngineMessage] = _Inbox(self.reader, EngineMessage)
        self._writer = FrameWriter(sock)
        self._sending = threading.Lock()
        self._is_closed = False

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def num_dropped(self) -> int:
        return self._inbox.num_dropped

    # -----------------------------------------------------------------------------------------------------------
    # Sending.

    def send(self, message: ClientMessage, buffers: Sequence[Buffer] = (), deadline: float | None = None) -> None:
        """Sends a message; the buffers may be changed once it returns.

        Blocks while the socket is full, until `deadline` (monotonic seconds). Raises `InvalidRequestError` for a
        message that cannot be encoded or is too large, `TimeoutError` at the deadline, and `StreamClosed` if the engine
        has ended or this client is closing. A message that raised is not sent, except one that was partly written: the
        next call writes its rest first.
        """
        frame = self._lay_out(message, buffers)
        held: list[bool] = []
        try:
            recorded(held, self._sending.acquire, True, -1 if deadline is None else _seconds_left(deadline))
            if not held[0]:
                raise TimeoutError
            self._send(frame, deadline)
        finally:
            if held and held[0]:
                self._sending.release()

    def _lay_out(self, message: ClientMessage, buffers: Sequence[Buffer]) -> list[memoryview]:
        try:
            body = self._encoder.encode(message)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise InvalidRequestError(f"cannot be sent to the engine: {error}", field="message", value=None) from error
        try:
            return encode_frame(body, buffers, self._limits)
        except ValueError as error:
            num_bytes = len(body) + sum(map(len, buffers))
            raise InvalidRequestError(f"{error}; send less per call", field="message", value=num_bytes) from error

    def _send(self, frame: list[memoryview], deadline: float | None) -> None:
        if self._is_closed:
            raise StreamClosed
        self._write_all(deadline)  # the rest of a message that was partly written
        num_bytes = sum(map(len, frame))
        try:
            self._writer.push(frame)
            self._write_all(deadline)
        finally:
            if self._writer.num_waiting_bytes == num_bytes:
                self._writer.clear()  # no byte of it was written
            else:
                self._writer.copy_backlog()

    def _write_all(self, deadline: float | None) -> None:
        while not self._writer.write():
            poll = select.poll()
            poll.register(self._socket, select.POLLOUT)
            for fd in self._wakeup_fds:
                poll.register(fd, select.POLLIN)
            ready = {fd for fd, _ in poll.poll(None if deadline is None else _milliseconds(_seconds_left(deadline)))}
            if ready.intersection(self._wakeup_fds):
                raise StreamClosed
            if not ready and deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError

    def shutdown_write(self, last: ClientMessage, timeout_s: float) -> None:
        """Sends a last message if the socket accepts it at once, and shuts down writing: the engine reads what was
        sent, then end of stream. Waits at most `timeout_s` seconds for another thread's `send`, which the closing
        descriptor should have woken.
        """
        is_ours = self._sending.acquire(timeout=timeout_s)
        self._is_closed = True
        try:
            if is_ours:
                self._send_last(last)
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            return  # the engine has ended
        finally:
            if is_ours:
                self._sending.release()

    def _send_last(self, last: ClientMessage) -> None:
        try:
            self._writer.push(self._lay_out(last, ()))
            self._writer.write()
        except StreamClosed:
            self._writer.clear()

    # -----------------------------------------------------------------------------------------------------------
    # Receiving.

    def receive(self) -> Received[EngineMessage] | None:
        """The next message that has arrived; never blocks.

        Raises `StreamClosed` once the engine has closed its end, `EngineDeadError` after bytes that are not a frame.
        """
        try:
            return self._inbox.receive()
        except FrameError as error:
            raise EngineDeadError(f"the engine's stream cannot be read: {error}", process="engine") from error

    def close(self) -> None:
        """Idempotent. No thread may be in `send` or `receive`."""
        self._is_closed = True
        self._socket.close()


def _seconds_left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _milliseconds(seconds: float) -> int:
    return math.ceil(seconds * 1e3)
