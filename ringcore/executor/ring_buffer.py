"""A byte ring in shared memory: one writer, a fixed set of readers, no lock and no name."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from ringcore.executor.memory_order import make_fence
from ringcore.executor.ring_memory import RingCorruptError, RingHandle, RingMapping
from ringcore.executor.waiting import signal_event

__all__ = ["LINE", "Buffer", "RingClosed", "RingReader", "RingWriter"]

Buffer = bytes | bytearray | memoryview

LINE = 64  # bytes of a cache line; records begin at multiples of it
RESTART_BYTES = 1 << 20

# Words (u64) of the control page; each has a line of its own.
_HEAD, _CLOSED, _SPACE_WANTED = 8, 16, 24
# Words of a reader's own page.
_TAIL, _READER_CLOSED = 0, 8

_RECORD = struct.Struct("<IIQ")  # kind, payload bytes, position: the first 16 bytes of a record's first line
_WRAP = 0  # the kind of the marker that ends a lap; a caller's kinds start at 1


class RingClosed(Exception):
    """The other side has closed the ring, or this side has."""


# Who writes what. A word has one writer, is aligned, and is stored and loaded whole.
#
#   word            where             writer    meaning
#   --------------  ----------------  --------  ----------------------------------------------------------------
#   head            control page      writer    bytes ever published; position % capacity is a place in the data
#   tail            reader's page     reader    bytes ever released by it: tail <= head <= tail + capacity
#   closed          control page      writer    no record follows; readers take what is there, then `RingClosed`
#   closed          reader's page     reader    it reads no more; the writer gets `RingClosed` in place of a wait
#   space_wanted    control page      writer    it waits for space: a reader that releases writes `space_fd`
#
# Order of writes. Writer: marker (if any) and record, fence, head, wake_fds. Reader: head, fence, record, and, when it
# is done with the bytes, fence, tail, then a look at space_wanted. So a reader never sees a byte of an unpublished
# record, a writer never overwrites a byte that a reader still needs, and the death of either leaves no half record.
#
# Records begin at multiples of 64 and never wrap: kind u32, payload bytes u32, own position u64, 48 spare bytes, then
# the payload. Where a record does not fit before the end of the data, the rest of the lap is a marker (kind 0) and the
# record begins at 0. The marker's bytes are counted in the positions like a record's, so the slowest reader gates both.
#
# A store (tail, or space_wanted) followed by a load of the other side's word may be reordered even on x86-64. So a
# wake of the *writer* may be missed, once; whoever waits for space therefore sleeps at most `SPACE_TICK_S` at a time.
# A wake of a reader cannot be missed: it is written always, after the head.


class RingWriter:
    """The writing end. Not thread-safe."""

    def __init__(self, handle: RingHandle) -> None:
        self._map = RingMapping(handle, is_writer=True)
        self._acks = [self._map.map_ack(handle, i, is_reader=False) for i in range(self._map.num_readers)]
        self._wake_fds = [handle.wake_fds[i] for i in range(self._map.num_readers)]
        self._words, self._data, self._capacity = self._map.words, self._map.data, self._map.capacity
        self._fence = make_fence()
        self._head = self._words[_HEAD]
        self._tails = [0] * self._map.num_readers
        self._free_until = self._capacity  # the highest head that the tails last seen allow
        self.max_payload_bytes = self._capacity // 2 - LINE
        self.closed = False

    def try_write(self, kind: int, parts: Sequence[Buffer]) -> bool:
        """Publishes one record, the parts one after the other. False where the slowest reader leaves no room.

        `parts` are one-dimensional byte buffers of at most `max_payload_bytes` together; they are copied. After a
        False the readers write `space_fd` as they release. Raises `RingClosed`, `RingCorruptError`.
        """
        payload = sum(map(len, parts))
        assert kind > _WRAP
        assert payload <= self.max_payload_bytes
        if self.closed:
            raise RingClosed
        need = LINE + (payload + LINE - 1) // LINE * LINE
        skip = self._lap_rest(need)
        if not self._make_room(skip + need):
            return False
        data, at = self._data, self._head % self._capacity
        if skip:
            _RECORD.pack_into(data, at, _WRAP, skip - LINE, self._head)
            at = 0
        _RECORD.pack_into(data, at, kind, payload, self._head + skip)
        at += LINE
        for part in parts:
            data[at : at + len(part)] = part
            at += len(part)
        self._publish(self._head + skip + need)
        return True

    def _lap_rest(self, need: int) -> int:
        """Bytes to leave unused so that a record of `need` bytes begins at 0; 0 where it goes on here.

        A ring that everybody has emptied starts again at 0 after each `RESTART_BYTES`, which stays in the cache and
        keeps a quiet ring's resident memory small. The record must not reach the marker that sends the readers there.
        """
        at = self._head % self._capacity
        rest = self._capacity - at
        if need > rest or (at >= RESTART_BYTES and need <= at and self._lowest_tail() == self._head):
            return rest
        return 0

    def _make_room(self, num_bytes: int) -> bool:
        wanted = self._head + num_bytes
        if wanted <= self._free_until:
            return True
        self._words[_SPACE_WANTED] = 1  # before the tails are read
        self._free_until = self._lowest_tail() + self._capacity
        if wanted > self._free_until:
            if any(ack[_READER_CLOSED] for ack in self._acks):
                raise RingClosed
            return False
        self._words[_SPACE_WANTED] = 0
        return True

    def _lowest_tail(self) -> int:
        for i, ack in enumerate(self._acks):
            tail = ack[_TAIL]
            if not self._tails[i] <= tail <= self._head or tail % LINE:
                raise RingCorruptError(f"reader {i} released {tail} bytes of {self._head}, {self._tails[i]} before")
            self._tails[i] = tail
        if self._fence:
            self._fence()
        return min(self._tails)

    def _publish(self, head: int) -> None:
        if self._fence:
            self._fence()
        self._head = self._words[_HEAD] = head
        for fd in self._wake_fds:
            signal_event(fd)

    def has_room(self, payload: int) -> bool:
        """Whether `try_write` of this many bytes would succeed now; asks the readers to signal where it would not."""
        need = LINE + (payload + LINE - 1) // LINE * LINE
        return self._make_room(self._lap_rest(need) + need)

    def lagging(self) -> list[int]:
        """The readers that have not released everything."""
        self._lowest_tail()
        return [i for i, tail in enumerate(self._tails) if tail < self._head]

    def close(self) -> None:
        """Tells the readers that no record follows, and lets go of the memory. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self._words[_CLOSED] = 1
        for fd in self._wake_fds:
            signal_event(fd)
        self._map.close()


class RingReader:
    """The reading end `index`. Not thread-safe."""

    def __init__(self, handle: RingHandle, index: int) -> None:
        self._map = RingMapping(handle, is_writer=False)
        self._ack = self._map.map_ack(handle, index, is_reader=True)
        self._words, self._data, self._capacity = self._map.words, self._map.data, self._map.capacity
        self._space_fd = handle.space_fd
        self._fence = make_fence()
        self._position = self._ack[_TAIL]
        self._end: int | None = None  # of the record that is on lease
        self.closed = False

    def try_read(self) -> tuple[int, memoryview] | None:
        """The next record's kind and payload, or None where there is none.

        The payload is read-only shared memory and holds until `release`, which must come before the next read.
        Raises `RingClosed` after the last record of a closed ring, `RingCorruptError` for what cannot be.
        """
        assert self._end is None, "the record before was not released"
        if self.closed:
            raise RingClosed
        head = self._words[_HEAD]
        if head == self._position:
            self._raise_if_finished()
            return None
        if self._fence:
            self._fence()
        if not self._position < head <= self._position + self._capacity:
            raise RingCorruptError(f"the ring's head is {head}, this reader is at {self._position}")
        kind, payload, end = self._record(head)
        if kind == _WRAP:
            if end % self._capacity:
                raise RingCorruptError(f"a marker at {self._position} ends before its lap, at {end}")
            self._position = end
            kind, payload, end = self._record(head)
        start = self._position % self._capacity + LINE
        if kind == _WRAP or start + payload > self._capacity:
            raise RingCorruptError(f"record at {self._position}: kind {kind}, {payload} bytes cannot be")
        self._end = end
        return kind, self._data[start : start + payload]

    def _raise_if_finished(self) -> None:
        if self._words[_CLOSED]:
            if self._fence:
                self._fence()
            # The head once more, after the word: what was published before the close is still delivered.
            if self._words[_HEAD] == self._position:
                raise RingClosed

    def _record(self, head: int) -> tuple[int, int, int]:
        """Kind, payload bytes and end of the record at this position."""
        kind, payload, position = _RECORD.unpack_from(self._data, self._position % self._capacity)
        end = self._position + LINE + (payload + LINE - 1) // LINE * LINE
        if position != self._position or end > head:
            raise RingCorruptError(f"record at {self._position} says {position}, {payload} bytes; head is {head}")
        return kind, payload, end

    def release(self) -> None:
        """Gives the bytes of the last record back to the writer."""
        assert self._end is not None, "no record is on lease"
        if self.closed:
            return
        if self._fence:
            self._fence()
        self._position = self._ack[_TAIL] = self._end
        self._end = None
        if self._words[_SPACE_WANTED]:
            signal_event(self._space_fd)

    def close(self) -> None:
        """Tells the writer that nobody reads here any more, and lets go of the memory. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self._ack[_READER_CLOSED] = 1
        signal_event(self._space_fd)
        self._map.close()
