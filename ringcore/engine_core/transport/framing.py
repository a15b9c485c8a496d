"""Framing on a stream socket with scatter-gather writes: a header, a message, and its buffers.

    magic 8s │ number of buffers u32 │ message bytes u32 │ bytes of each buffer u64 ... │ message │ buffer 0 │ ...

Both ends are non-blocking. An exception that a signal handler raises (Ctrl-C) never corrupts the stream: the number of
bytes that a system call moved is recorded before any handler can run (see `recorded`).
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

__all__ = [
    "HEADER",
    "LENGTH_BYTES",
    "MAGIC",
    "MAX_BUFFERS_PER_RANK",
    "MAX_BUFFER_BYTES",
    "MAX_MESSAGE_BYTES",
    "Buffer",
    "Frame",
    "FrameError",
    "FrameLimits",
    "FrameWriter",
    "StreamClosed",
    "encode_frame",
    "recorded",
]

Buffer = bytes | bytearray | memoryview
T = TypeVar("T")

MAX_MESSAGE_BYTES = 64 << 20
MAX_BUFFER_BYTES = 1 << 30
MAX_BUFFERS_PER_RANK = 64

MAGIC = b"ringcor1"
HEADER = struct.Struct("<8sII")
LENGTH_BYTES = 8
_COALESCED_BYTES = 64 << 10  # up to this size a message is copied after its header into one iovec
_MAX_IOVECS = 64  # far below the kernel's IOV_MAX


class StreamClosed(Exception):
    """The peer has closed its end, and everything that it sent has been read."""


class FrameError(Exception):
    """The received bytes are not a frame: nothing after them can be read."""


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """Limits of one frame."""

    message_bytes: int = MAX_MESSAGE_BYTES
    buffer_bytes: int = MAX_BUFFER_BYTES  # all buffers together
    num_buffers: int = MAX_BUFFERS_PER_RANK

    @classmethod
    def for_ranks(cls, num_ranks: int) -> FrameLimits:
        """The limits if a message carries one value per rank."""
        return cls(num_buffers=MAX_BUFFERS_PER_RANK * num_ranks)

    def limit_error(self, message_bytes: int, num_buffers: int, buffer_bytes: int) -> str | None:
        """The error text for a frame above a limit; None if it is within them."""
        if message_bytes > self.message_bytes:
            return f"a message of {message_bytes} bytes is above the limit of {self.message_bytes}"
        if num_buffers > self.num_buffers:
            return f"a message with {num_buffers} buffers is above the limit of {self.num_buffers}"
        if buffer_bytes > self.buffer_bytes:
            return f"a message with buffers of {buffer_bytes} bytes is above the limit of {self.buffer_bytes}"
        return None


class Frame(NamedTuple):
    message: memoryview
    buffers: list[bytearray]


def encode_frame(message: bytes, buffers: Sequence[Buffer], limits: FrameLimits) -> list[memoryview]:
    """A frame as the list of views to write in order; no buffer is copied. Raises `ValueError` above a limit."""
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    lengths = [len(view) for view in views]
    limit_error = limits.limit_error(len(message), len(views), sum(lengths))
    if limit_error is not None:
        raise ValueError(limit_error)
    head = HEADER.pack(MAGIC, len(views), len(message)) + struct.pack(f"<{len(views)}Q", *lengths)
    first = [head + message] if len(message) <= _COALESCED_BYTES else [head, message]
    return [*(memoryview(part) for part in first), *(view for view in views if view)]


def recorded(results: list[T], function: Callable[..., T], *arguments: Any) -> None:
    """Calls the function, implemented in C, and appends its result to `results`, atomically for signal handlers.

    Python runs signal handlers between bytecodes. In `n = sock.send(data)` one may raise after the bytes were sent and
    before `n` is bound; here the result is in the list before the interpreter runs another bytecode.
    """
    results.extend(map(function, *((argument,) for argument in arguments)))


class _Outgoing(NamedTuple):
    """The views to write, and the number of bytes that each system call has written of them since `_trim`."""

    views: list[memoryview]
    moved: list[int]


class FrameWriter:
    """Writes frames to a non-blocking socket and keeps the backlog that the socket does not accept. One thread at a
    time.

    Invariant: `_out` is exactly the unwritten backlog. It changes only by single assignments and by calls that are
    atomic for a signal handler.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._out = _Outgoing([], [])

    @property
    def num_waiting_bytes(self) -> int:
        out = self._out
        return sum(map(len, out.views)) - sum(out.moved)

    @property
    def has_backlog(self) -> bool:
        self._trim()
        return bool(self._out.views)

    def push(self, frame: list[memoryview]) -> None:
        """Appends a frame to the backlog. Its memory must not change until it is written, or `copy_backlog`."""
        self._out.views.extend(frame)

    def write(self) -> bool:
        """Writes what the socket accepts at once; returns whether the backlog is empty. Raises `StreamClosed`."""
        while self.has_backlog:
            out = self._out
            try:
                recorded(out.moved, self._socket.sendmsg, out.views[:_MAX_IOVECS])
            except BlockingIOError:
                return False
            except (BrokenPipeError, ConnectionResetError) as error:
                raise StreamClosed from error
        return True

    def copy_backlog(self) -> None:
        """Copies the backlog, so that the caller may reuse its memory."""
        self._trim()
        if self._out.views:
            self._out = _Outgoing([memoryview(bytes(view)) for view in self._out.views], [])

    def clear(self) -> None:
        self._out = _Outgoing([], [])

    def _trim(self) -> None:
        """Drops the written bytes."""
        views, moved = self._out
        if not moved:
            return
        num_bytes = sum(moved)
        num_whole = sum(1 for end in accumulate(map(len, views[:_MAX_IOVECS])) if end <= num_bytes)
        rest = views[num_whole:]
        num_bytes -= sum(map(len, views[:num_whole]))
        if num_bytes:
            rest[0] = rest[0][num_bytes:]
        self._out = _Outgoing(rest, [])
