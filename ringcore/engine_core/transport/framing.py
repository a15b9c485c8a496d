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
    "MAX_BUFFERS_PER_RANK",
    "MAX_BUFFER_BYTES",
    "MAX_MESSAGE_BYTES",
    "Buffer",
    "Frame",
    "FrameError",
    "FrameLimits",
    "FrameReader",
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

_MAGIC = b"ringcor1"
_HEADER = struct.Struct("<8sII")
_LENGTH_BYTES = 8
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
    head = _HEADER.pack(_MAGIC, len(views), len(message)) + struct.pack(f"<{len(views)}Q", *lengths)
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


class _Incoming(NamedTuple):
    """A partly received frame: the header, then lengths and message as one piece, then each buffer."""

    whole: tuple[bytearray, ...]  # the complete pieces
    piece: bytearray  # the piece being filled
    moved: list[int]  # the bytes that each system call has read into it
    following: tuple[int, ...] = ()  # sizes in bytes of the buffers after it


class FrameReader:
    """Reads frames from a non-blocking socket, in any fragmentation. One thread at a time.

    `bytes_per_read` bounds what one `read` takes from the socket, so that a large frame does not block the calling
    loop; None: no bound.

    Invariant: `_in` is exactly what has arrived of the next frame; it changes as `FrameWriter._out` does.
    """

    def __init__(self, sock: socket.socket, limits: FrameLimits, bytes_per_read: int | None = None) -> None:
        self._socket, self._limits = sock, limits
        self._bytes_per_read = bytes_per_read
        self._in = _fresh()
        self._error: FrameError | None = None

    def read(self) -> Frame | None:
        """The next frame, or None if it is not complete; never blocks.

        Raises `StreamClosed`, also in the middle of a frame, and `FrameError`, which every later call raises again.
        """
        if self._error is not None:
            raise FrameError(*self._error.args)
        left = self._bytes_per_read
        while True:
            num_bytes = self._fill(left)
            if num_bytes is None:
                return None
            if left is not None:
                left -= num_bytes
            frame = self._finish_piece()
            if frame is not None:
                return frame

    def _fill(self, max_bytes: int | None) -> int | None:
        """Fills the current piece; returns the number of bytes read, or None if the piece is not complete."""
        incoming = self._in = self._in._replace(moved=[sum(self._in.moved)])
        piece = memoryview(incoming.piece)
        filled = start = incoming.moved[0]
        while filled < len(piece):
            end = len(piece) if max_bytes is None else min(len(piece), start + max_bytes)
            if filled >= end:
                return None
            try:
                recorded(incoming.moved, self._socket.recv_into, piece[filled:end])
            except BlockingIOError:
                return None
            except ConnectionResetError as error:
                raise StreamClosed from error
            if incoming.moved[-1] == 0:
                raise StreamClosed
            filled += incoming.moved[-1]
        return filled - start

    def _finish_piece(self) -> Frame | None:
        """Starts the next piece, or returns the frame if that was the last one."""
        incoming = self._in
        whole = (*incoming.whole, incoming.piece)
        if len(whole) == 1:
            num_buffers, message_bytes = self._check_header(incoming.piece)
            self._in = _Incoming(whole, bytearray(num_buffers * _LENGTH_BYTES + message_bytes), [])
            return None
        following = self._check_lengths(*whole) if len(whole) == 2 else incoming.following
        if following:
            self._in = _Incoming(whole, bytearray(following[0]), [], following[1:])
            return None
        num_buffers = len(whole) - 2
        frame = Frame(memoryview(whole[1])[num_buffers * _LENGTH_BYTES :], list(whole[2:]))
        self._in = _fresh()
        return frame

    def _check_header(self, header: bytearray) -> tuple[int, int]:
        magic, num_buffers, message_bytes = _HEADER.unpack(header)
        if magic != _MAGIC:
            self._fail(f"a header that begins with {bytes(magic)!r}, not {_MAGIC!r}")
        self._check(message_bytes, num_buffers, 0)
        return num_buffers, message_bytes

    def _check_lengths(self, header: bytearray, piece: bytearray) -> tuple[int, ...]:
        _, num_buffers, message_bytes = _HEADER.unpack(header)
        lengths = struct.unpack_from(f"<{num_buffers}Q", piece)
        self._check(message_bytes, num_buffers, sum(lengths))
        return lengths

    def _check(self, message_bytes: int, num_buffers: int, buffer_bytes: int) -> None:
        limit_error = self._limits.limit_error(message_bytes, num_buffers, buffer_bytes)
        if limit_error is not None:
            self._fail(limit_error)

    def _fail(self, text: str) -> None:
        self._error = FrameError(text)
        raise self._error


def _fresh() -> _Incoming:
    return _Incoming((), bytearray(_HEADER.size), [])
