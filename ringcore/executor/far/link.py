"""This end of the connection to another host: streams of messages in either direction, and notes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

from ringcore.executor.far.frames import (
    CLOSED,
    LEFT,
    NOTE,
    PART,
    RELEASED,
    Note,
    pack_note,
    unpack_head,
    unpack_note,
)
from ringcore.executor.far.port import Port
from ringcore.executor.far.queues import FarReader, FarWriter
from ringcore.executor.ring_buffer import Buffer
from ringcore.executor.ring_memory import RingCorruptError
from ringcore.executor.waiting import Event, RingClosed, Waiter

__all__ = ["Link"]


class Link:
    """peer: the other host, for a person. address: the frames before each message, which lead to it.

    lost_fd: an eventfd that stays readable once the connection has ended; `why` then says how.
    Streams are numbered from 0, in each direction apart: a writer here and the reader of its number there are one.
    """

    def __init__(self, port: Port, peer: str, address: Sequence[bytes] = ()) -> None:
        self.peer = peer
        self.why: str | None = None
        self._lost = Event()
        self.lost_fd = self._lost.fd
        self.on_note: Callable[[Note], None] = lambda note: None
        self.pump = port.pump
        self.burst: Callable[[], AbstractContextManager[None]] = port.burst
        self.sources: Sequence[int] = port.sources
        self._port, self._address = port, list(address)
        self._writers: dict[int, FarWriter] = {}
        self._readers: dict[int, FarReader] = {}

    def writer(self, channel: int, window_bytes: int, deaths: Sequence[int] = (), spin_s: float = 0.0) -> FarWriter:
        writer = self._writers[channel] = FarWriter(self, channel, window_bytes, [self.lost_fd, *deaths], spin_s)
        return writer

    def reader(self, channel: int, window_bytes: int, deaths: Sequence[int] = (), spin_s: float = 0.0) -> FarReader:
        reader = self._readers[channel] = FarReader(self, channel, window_bytes, [self.lost_fd, *deaths], spin_s)
        return reader

    def waiter(self, events: Iterable[int] = (), deaths: Iterable[int] = (), spin_s: float = 0.0) -> Waiter:
        """Waits for what arrives, too, and for the end of the connection. Raises `RingClosed` once this end or its port
        is closed: the descriptors may be other files' then."""
        with self._port.lock:
            if self._port.is_closed or self._lost.fd < 0:
                raise RingClosed
            return Waiter(events, [self.lost_fd, *deaths], spin_s, self.sources)

    def transmit(self, frame: Buffer) -> None:
        if self.why is None:
            self._port.send([*self._address, frame])

    def note(self, note: Note) -> None:
        self.transmit(pack_note(note))

    def take(self, frame: memoryview) -> None:
        """Hands a frame that has arrived to its stream. One that is none ends the connection."""
        if self.why is not None:
            return
        try:
            self._take(frame)
        except RingCorruptError as error:
            self.lose(f"it sent what cannot be: {error}")

    def _take(self, frame: memoryview) -> None:
        kind, channel, position, size = unpack_head(frame)
        if kind == NOTE:
            self.on_note(unpack_note(frame))
            return
        streams = self._readers if kind in (PART, CLOSED) else self._writers
        if channel not in streams or kind not in (PART, CLOSED, RELEASED, LEFT):
            raise RingCorruptError(f"a frame of kind {kind} for stream {channel}, which is none")
        streams[channel].take(kind, position, size, frame)

    def lose(self, why: str) -> None:
        """The connection has ended. What arrived before is still read. The first reason stays."""
        if self.why is None:
            self.why = why
            self._lost.signal()

    def close(self) -> None:
        """Frees the descriptors. Idempotent; the port stays."""
        with self._port.lock:
            for stream in (*self._writers.values(), *self._readers.values()):
                stream.free()  # first: who is woken by the loss shall find its stream closed
            self.lose("it was closed here")
            self._lost.close()
