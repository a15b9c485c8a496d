"""Frames on a stream socket: a header, a message, and the buffers beside it.

    magic 8s │ number of buffers u32 │ message bytes u32 │ bytes of each buffer u64 ... │ message │ buffer 0 │ ...

Both ends are non-blocking. An exception that a signal handler raises (Ctrl-C) never tears the stream: how many bytes a
call of the socket moved is on record before any handler can run (see `recorded`).
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

__all__ = [
    "MAX_BUFFERS_A_RANK",
    "MAX_BUFFER_BYTES",
    "MAX_MESSAGE_BYTES",
    "Buffer",
    "Frame",
    "FrameError",
    "FrameLimits",
    "FrameReader",
    "FrameWriter",
    "StreamClosed",
    "lay_out",
    "recorded",
]

Buffer = bytes | bytearray | memoryview
T = TypeVar("T")

MAX_MESSAGE_BYTES = 64 << 20
MAX_BUFFER_BYTES = 1 << 30
MAX_BUFFERS_A_RANK = 64

_MAGIC = b"ringcor1"
_HEADER = struct.Struct("<8sII")
_LENGTH_BYTES = 8
_JOINED_BYTES = 64 << 10  # a message up to this is copied behind its header, so that a call of the kernel takes both
_VIEWS_A_CALL = 64  # far below the kernel's IOV_MAX


class StreamClosed(Exception):
    """The other end is closed, and everything that it sent has been read."""


class FrameError(Exception):
    """What arrived is no frame: nothing behind it can be read."""


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """What one frame may hold."""

    message_bytes: int = MAX_MESSAGE_BYTES
    buffer_bytes: int = MAX_BUFFER_BYTES  # all buffers together
    num_buffers: int = MAX_BUFFERS_A_RANK

    @classmethod
    def for_ranks(cls, num_ranks: int) -> FrameLimits:
        """The limits where a message carries a value of each rank."""
        return cls(num_buffers=MAX_BUFFERS_A_RANK * num_ranks)

    def excess(self, message_bytes: int, num_buffers: int, buffer_bytes: int) -> str | None:
        """What is above a limit, for a person; None where nothing is."""
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


def lay_out(message: bytes, buffers: Sequence[Buffer], limits: FrameLimits) -> list[memoryview]:
    """A frame as the views to write one after the other; no buffer is copied. Raises `ValueError` above a limit."""
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    lengths = [len(view) for view in views]
    excess = limits.excess(len(message), len(views), sum(lengths))
    if excess is not None:
        raise ValueError(excess)
    head = _HEADER.pack(_MAGIC, len(views), len(message)) + struct.pack(f"<{len(views)}Q", *lengths)
    first = [head + message] if len(message) <= _JOINED_BYTES else [head, message]
    return [*(memoryview(part) for part in first), *(view for view in views if view)]


def recorded(results: list[T], function: Callable[..., T], *arguments: Any) -> None:
    """Calls the function, implemented in C, and appends what it returns to `results`, with no gap in between.

    Python runs signal handlers between bytecodes. In `n = sock.send(data)` one may raise after the bytes have left and
    before `n` is bound; here the result is in the list before the interpreter gets to run a bytecode again.
    """
    results.extend(map(function, *((argument,) for argument in arguments)))


class _Outgoing(NamedTuple):
    """The views to write, and how many bytes of them each call has moved since they were trimmed."""

    views: list[memoryview]
    moved: list[int]


class FrameWriter:
    """Writes frames to a non-blocking socket; what the socket does not take waits here. One thread at a time.

    Invariant: `_out` says exactly what is still to be written. It is changed by single assignments and by calls that
    are one step for a signal handler.
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
        """Puts a frame behind what waits. Its memory must stay as it is until it is written, or `own_backlog`."""
        self._out.views.extend(frame)

    def write(self) -> bool:
        """Writes what the socket takes at once; whether nothing waits any more. Raises `StreamClosed`."""
        while self.has_backlog:
            out = self._out
            try:
                recorded(out.moved, self._socket.sendmsg, out.views[:_VIEWS_A_CALL])
            except BlockingIOError:
                return False
            except (BrokenPipeError, ConnectionResetError) as error:
                raise StreamClosed from error
        return True

    def own_backlog(self) -> None:
        """Copies what waits, so that the memory it came from is free."""
        self._trim()
        if self._out.views:
            self._out = _Outgoing([memoryview(bytes(view)) for view in self._out.views], [])

    def clear(self) -> None:
        self._out = _Outgoing([], [])

    def _trim(self) -> None:
        """Takes away what has been written."""
        views, moved = self._out
        if not moved:
            return
        num_bytes = sum(moved)
        num_whole = sum(1 for end in accumulate(map(len, views[:_VIEWS_A_CALL])) if end <= num_bytes)
        rest = views[num_whole:]
        num_bytes -= sum(map(len, views[:num_whole]))
        if num_bytes:
            rest[0] = rest[0][num_bytes:]
        self._out = _Outgoing(rest, [])


class _Incoming(NamedTuple):
    """A frame of which a part has arrived: the header, then lengths and message as one piece, then each buffer."""

    whole: tuple[bytearray, ...]  # pieces that are complete
    piece: bytearray  # the one being filled
    moved: list[int]  # the bytes that each call has put into it
    following: tuple[int, ...] = ()  # the bytes of the buffers after it


class FrameReader:
    """Reads frames from a non-blocking socket, in whatever fragments they arrive. One thread at a time.

    `bytes_a_read` bounds what one `read` takes from the socket, so that a large frame does not hold its reader up; None
    takes all that is there.

    Invariant: `_in` says exactly what has arrived of the next frame; it changes as `FrameWriter._out` does.
    """

    def __init__(self, sock: socket.socket, limits: FrameLimits, bytes_a_read: int | None = None) -> None:
        self._socket, self._limits = sock, limits
        self._bytes_a_read = bytes_a_read
        self._in = _fresh()
        self._error: FrameError | None = None

    def read(self) -> Frame | None:
        """The next frame, or None where it has not arrived whole; never blocks.

        Raises `StreamClosed`, also in the middle of a frame, and `FrameError`, which every later call raises again.
        """
        if self._error is not None:
            raise FrameError(*self._error.args)
        left = self._bytes_a_read
        while True:
            num_bytes = self._fill(left)
            if num_bytes is None:
                return None
            if left is not None:
                left -= num_bytes
            frame = self._piece_is_whole()
            if frame is not None:
                return frame

    def _fill(self, max_bytes: int | None) -> int | None:
        """Fills the current piece; how many bytes that took, or None where they have not all come."""
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

    def _piece_is_whole(self) -> Frame | None:
        """Goes on to the next piece, or hands over the frame if that was the last one."""
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
        excess = self._limits.excess(message_bytes, num_buffers, buffer_bytes)
        if excess is not None:
            self._fail(excess)

    def _fail(self, text: str) -> None:
        self._error = FrameError(text)
        raise self._error


def _fresh() -> _Incoming:
    return _Incoming((), bytearray(_HEADER.size), [])
