"""Reads frames (`framing`) from a stream socket."""

from __future__ import annotations

import socket
import struct
from typing import NamedTuple

from ringcore.engine_core.transport.framing import (
    HEADER,
    LENGTH_BYTES,
    MAGIC,
    Frame,
    FrameError,
    FrameLimits,
    StreamClosed,
    recorded,
)

__all__ = ["FrameReader"]

_AHEAD_BYTES = 64 << 10  # that one system call reads, where frames are small


class _Ahead(NamedTuple):
    """Bytes that were read from the socket before the pieces that they belong to."""

    data: list[bytes]  # at most one; an empty one is the end of the stream
    num_used: int = 0


class _Incoming(NamedTuple):
    """A partly received frame: the header, then lengths and message as one piece, then each buffer."""

    whole: tuple[bytearray, ...]  # the complete pieces
    piece: bytearray  # the piece being filled
    moved: list[int]  # the bytes that each system call has read into it
    ahead: _Ahead
    following: tuple[int, ...] = ()  # sizes in bytes of the buffers after it


class FrameReader:
    """Reads frames from a non-blocking socket, in any fragmentation. One thread at a time.

    `bytes_per_read` bounds what one `read` takes from the socket, so that a large frame does not block the calling
    loop; None: no bound. `reads_ahead`: a system call may read several small frames; then bytes of the next one can be
    here while the socket has none, so the caller must look at `has_read_ahead` before it waits for the socket.

    Invariant: `_in` is exactly what has arrived of the next frames; it changes as `FrameWriter._out` does.
    """

    def __init__(
        self, sock: socket.socket, limits: FrameLimits, bytes_per_read: int | None = None, *, reads_ahead: bool = False
    ) -> None:
        self._socket, self._limits = sock, limits
        self._bytes_per_read, self._reads_ahead = bytes_per_read, reads_ahead
        self._in = _fresh(_Ahead([]))
        self._error: FrameError | None = None
        self._has_emptied = False

    @property
    def has_read_ahead(self) -> bool:
        return any(self._in.ahead.data)

    @property
    def may_have_more(self) -> bool:
        """False if nothing was left, in the socket or here, when it was last read from."""
        return self.has_read_ahead or not self._has_emptied

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
            if not incoming.ahead.data and not self._receive(incoming, piece[filled:end]):
                return None
            if incoming.ahead.data:
                incoming = self._in = _use_ahead(incoming, filled)
            filled = sum(incoming.moved)
        return filled - start

    def _receive(self, incoming: _Incoming, wanted: memoryview) -> bool:
        """One system call, into the piece or ahead; returns whether the socket had something."""
        try:
            if self._reads_ahead and len(wanted) < _AHEAD_BYTES:
                recorded(incoming.ahead.data, self._socket.recv, _AHEAD_BYTES)
                num_bytes, num_asked = len(incoming.ahead.data[0]), _AHEAD_BYTES
            else:
                recorded(incoming.moved, self._socket.recv_into, wanted)
                num_bytes, num_asked = incoming.moved[-1], len(wanted)
        except BlockingIOError:
            self._has_emptied = True
            return False
        except ConnectionResetError as error:
            raise StreamClosed from error
        self._has_emptied = num_bytes < num_asked
        if num_bytes == 0:
            raise StreamClosed
        return True

    def _finish_piece(self) -> Frame | None:
        """Starts the next piece, or returns the frame if that was the last one."""
        incoming = self._in
        whole = (*incoming.whole, incoming.piece)
        if len(whole) == 1:
            num_buffers, message_bytes = self._check_header(incoming.piece)
            piece = bytearray(num_buffers * LENGTH_BYTES + message_bytes)
            self._in = _Incoming(whole, piece, [], incoming.ahead)
            return None
        following = self._check_lengths(*whole) if len(whole) == 2 else incoming.following
        if following:
            self._in = _Incoming(whole, bytearray(following[0]), [], incoming.ahead, following[1:])
            return None
        num_buffers = len(whole) - 2
        frame = Frame(memoryview(whole[1])[num_buffers * LENGTH_BYTES :], list(whole[2:]))
        self._in = _fresh(incoming.ahead)
        return frame

    def _check_header(self, header: bytearray) -> tuple[int, int]:
        magic, num_buffers, message_bytes = HEADER.unpack(header)
        if magic != MAGIC:
            self._fail(f"a header that begins with {bytes(magic)!r}, not {MAGIC!r}")
        self._check(message_bytes, num_buffers, 0)
        return num_buffers, message_bytes

    def _check_lengths(self, header: bytearray, piece: bytearray) -> tuple[int, ...]:
        _, num_buffers, message_bytes = HEADER.unpack(header)
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


def _fresh(ahead: _Ahead) -> _Incoming:
    return _Incoming((), bytearray(HEADER.size), [], ahead)


def _use_ahead(incoming: _Incoming, filled: int) -> _Incoming:
    """Copies bytes that were read ahead into the piece after its first `filled` ones. Raises `StreamClosed` at the end
    of the stream. Nothing has changed until the caller takes the result, so it may be done again."""
    (data,), used = incoming.ahead
    if not data:
        raise StreamClosed
    taken = data[used : used + len(incoming.piece) - filled]
    incoming.piece[filled : filled + len(taken)] = taken
    used += len(taken)
    rest = _Ahead([data], used) if used < len(data) else _Ahead([])
    return incoming._replace(moved=[filled + len(taken)], ahead=rest)
