"""The message queue to a reader on another host: a stream of its connection (`link`), with a window (`window`)."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np

from ringcore.executor.far.frames import (
    CLOSED,
    HEAD_BYTES,
    LEFT,
    PART,
    PIECE_BYTES,
    RELEASED,
    pack_head,
)
from ringcore.executor.far.window import ReceiveWindow, SendWindow
from ringcore.executor.message_queue import MAX_MESSAGE_BYTES, Message, MessageReader, MessageWriter, Outgoing, split
from ringcore.executor.ring_buffer import Buffer, RingClosed
from ringcore.executor.ring_memory import RingCorruptError
from ringcore.executor.waiting import Event, Waiter

__all__ = ["FarReader", "FarWriter"]


class _Connection(Protocol):
    pump: Callable[[], None]
    burst: Callable[[], AbstractContextManager[None]]
    sources: Sequence[int]

    def transmit(self, frame: Buffer) -> None: ...


class _Stream:
    """One end: its event is signalled after each change that its peer made, and when this end is closed."""

    waiter: Waiter

    def __init__(self, link: _Connection, channel: int) -> None:
        self._link, self._channel = link, channel
        self._event = Event()
        self._is_closed = self._peer_closed = False

    def _tell(self, kind: int, position: int = 0) -> None:
        self._link.transmit(pack_head(kind, self._channel, position))

    def free(self) -> None:
        """Closes the descriptors; nothing more is taken. Idempotent."""
        self._is_closed = True
        self._event.close()
        self.waiter.close()


class FarWriter(_Stream, MessageWriter):
    """A link's writer of one stream."""

    def __init__(
        self, link: _Connection, channel: int, window_bytes: int, deaths: Sequence[int], spin_s: float
    ) -> None:
        super().__init__(link, channel)
        self._window = SendWindow(window_bytes)
        self.events, self.sources, self.burst = [self._event.fd], link.sources, link.burst
        self.waiter = Waiter(self.events, deaths, spin_s, self.sources)

    def try_send(self, parts: Sequence[Buffer]) -> bool:
        outgoing = Outgoing.of(parts)
        _, size = outgoing.laid
        if not self._has_room(size):
            return False
        head = pack_head(PART, self._channel, self._window.send(size), size)
        frames = outgoing.frames.get(head)
        if frames is None:
            frames = outgoing.frames[head] = _frames(head, *outgoing.laid)
        for frame in frames:
            self._link.transmit(frame)
        return True

    def has_room(self, parts: Sequence[Buffer]) -> bool:
        return self._has_room(Outgoing.of(parts).laid[1])

    def _has_room(self, size: int) -> bool:
        if self._is_closed:
            raise RingClosed
        if self._window.has_room(size):
            return True
        self._link.pump()
        if self._window.has_room(size):
            return True
        if self._peer_closed:
            raise RingClosed
        return False

    def unread_bytes(self) -> int:
        return self._window.head - self._window.tail

    def take(self, kind: int, position: int, size: int, frame: memoryview) -> None:
        """A frame of the reader. Raises `RingCorruptError`."""
        if kind == LEFT:
            self._peer_closed = True
        else:
            self._window.released(position)
        self._event.signal()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._tell(CLOSED, self._window.head)
            self._event.signal()


def _frames(head: bytes, laid: Sequence[Buffer], size: int) -> list[bytes]:
    return [b"".join((head, *piece)) for piece in ([laid] if size <= PIECE_BYTES else _pieces(laid))]


def _pieces(laid: Sequence[Buffer]) -> Iterator[list[memoryview]]:
    """The buffers, one after the other, cut into pieces of `PIECE_BYTES`."""
    piece: list[memoryview] = []
    room = PIECE_BYTES
    for buffer in laid:
        view = memoryview(buffer)
        while view:
            piece.append(view[:room])
            room -= len(piece[-1])
            view = view[len(piece[-1]) :]
            if not room:
                yield piece
                piece, room = [], PIECE_BYTES
    if piece:
        yield piece


class FarReader(_Stream, MessageReader):
    """A link's reader of one stream. A message of one piece stays in the frame that brought it."""

    def __init__(
        self, link: _Connection, channel: int, window_bytes: int, deaths: Sequence[int], spin_s: float
    ) -> None:
        _Stream.__init__(self, link, channel)
        MessageReader.__init__(self, spin_s)
        self._window = ReceiveWindow(window_bytes)
        self._arrived: deque[memoryview] = deque()
        self._partial: memoryview | None = None  # a message of several pieces, of which `_filled` bytes have come
        self._filled = 0
        self.events, self.sources = [self._event.fd], link.sources
        self.waiter = Waiter(self.events, deaths, sources=self.sources)
        self.has_message, self.spin_until = self._has_message, self._spin_until

    def _has_message(self) -> bool:
        if not self._arrived:
            self._link.pump()
        return bool(self._arrived) or self._peer_closed or self._is_closed

    def _spin_until(self, until: float) -> bool:
        while not self._has_message():
            if time.monotonic() >= until:
                return False
            os.sched_yield()
        return True

    def try_receive(self) -> Message | None:
        if self._is_closed:
            raise RingClosed
        if not self._has_message():
            return None
        if not self._arrived:
            raise RingClosed
        body = self._arrived.popleft()
        size = len(body)
        message = Message(lambda: self._release(size))
        message.parts = split(body)
        return message

    def _release(self, size: int) -> None:
        position = self._window.release(size)
        if position is not None and not self._is_closed:
            self._tell(RELEASED, position)

    def take(self, kind: int, position: int, size: int, frame: memoryview) -> None:
        """A frame of the writer. Raises `RingCorruptError`."""
        if kind == PART:
            self._take_piece(position, size, frame[HEAD_BYTES:])
        elif position != self._window.received or self._partial is not None:
            raise RingCorruptError(f"a stream ends at {position}, where {self._window.received} came")
        else:
            self._peer_closed = True
            self._event.signal()

    def _take_piece(self, position: int, size: int, piece: memoryview) -> None:
        self._window.check(position, size)
        if self._partial is None:
            if not len(piece) <= size <= MAX_MESSAGE_BYTES:
                raise RingCorruptError(f"a piece of {len(piece)} bytes of a message of {size}")
            if len(piece) == size:
                self._append(piece.toreadonly())
                return
            self._partial, self._filled = np.empty(size, np.uint8).data, 0
        end = self._filled + len(piece)
        if size != len(self._partial) or end > size or not piece:
            raise RingCorruptError(f"{end} bytes came of a message of {len(self._partial)}")
        self._partial[self._filled : end] = piece
        self._filled = end
        if end == size:
            whole, self._partial = self._partial.toreadonly(), None
            self._append(whole)

    def _append(self, body: memoryview) -> None:
        self._window.arrived(len(body))
        self._arrived.append(body)
        self._event.signal()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._tell(LEFT)
            self._event.signal()
