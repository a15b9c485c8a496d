"""A lock-free ring buffer in shared memory: one producer (writer), a fixed set of consumers (readers), no name."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Sequence

from ringcore.executor.memory_order import make_fence
from ringcore.executor.ring_memory import RingCorruptError, RingHandle, RingMapping
from ringcore.executor.waiting import RingClosed, signal_event

__all__ = ["LINE", "MAX_PARTS", "Buffer", "RecordTooLarge", "RingClosed", "RingReader", "RingWriter"]

Buffer = bytes | bytearray | memoryview

LINE = 64  # bytes of a cache line; records and their parts begin at multiples of it
MAX_PARTS = 64
RESTART_BYTES = 1 << 20

# Words (u64) of the control page; each has a line of its own.
_HEAD, _CLOSED, _SPACE_WANTED = 8, 16, 24
# Words of a reader's own page.
_TAIL, _READER_CLOSED = 0, 8

# A record's header: own position u64, bytes of the record u32, kind u16, parts u16, then the bytes of each part u32.
_HEADERS = [struct.Struct(f"<QIHH{n}I") for n in range(MAX_PARTS + 1)]
_HEADER_BYTES = [-(-header.size // LINE) * LINE for header in _HEADERS]
_WRAP = 0  # the kind of the wrap-around marker that ends a lap; a caller's kinds start at 1


class RecordTooLarge(Exception):
    """A record larger than half the ring: it could wait for room forever."""


# The words. Each has one writer, is aligned, and is stored and loaded atomically.
#
#   word            where             writer    meaning
#   --------------  ----------------  --------  ----------------------------------------------------------------
#   head            control page      writer    bytes ever published; position % capacity is a place in the data
#   tail            reader's page     reader    bytes ever released by it: tail <= head <= tail + capacity
#   closed          control page      writer    no record follows; readers read the rest, then `RingClosed`
#   closed          reader's page     reader    it reads no more; a writer without room gets `RingClosed`
#   space_wanted    control page      writer    it waits for space: a reader that releases writes `space_fd`
#
# The order of accesses by the producer (writer) and a consumer (reader), by state of a place in the data:
#
#   state of a place    writer                              reader                        next
#   ------------------  ----------------------------------  ----------------------------  -------------------------
#   free                may write it                        never looks at it             written
#   written             marker (if any), record; fence      does not see it: past head    published: head stored
#   published           never touches it; head, wake_fds    head loaded; fence; reads it  on lease
#   on lease            never touches it                    parts are valid               released: fence, tail stored
#   released            tails loaded; fence                 looks at space_wanted         free, once all have released
#
# So a reader never sees a byte of an unpublished record, a writer never overwrites a byte that a reader still needs,
# and the death of either leaves no half record. On x86-64 stores become visible in their order and loads are made in
# theirs, so no fence is needed there. ARM may reorder both: there each is a full memory fence (see memory_order).
#
# Records begin at multiples of 64 and never wrap: a header of one line (more for many parts), then each part at a
# multiple of 64. Wrap-around: if a record does not fit before the end of the data, the rest of the lap is a marker
# (kind 0) and the record begins at 0. The marker's bytes count in the positions like a record's, so the slowest reader
# limits the writer for both.
#
# A store (tail, or space_wanted) followed by a load of the other side's word may be reordered even on x86-64. So a wake
# of the *writer* may be missed, once; a writer that waits for space sleeps at most `SPACE_TICK_S` at a time.
# A wake of a reader cannot be missed: the writer always signals it, after the head, by a system call that orders both.


def _bytes_of(sizes: Sequence[int]) -> int:
    """Bytes of a record with parts of these sizes."""
    num_bytes = _HEADER_BYTES[len(sizes)]
    for size in sizes:
        num_bytes += (size + 63) & -64
    return num_bytes


class RingWriter:
    """The producer. Not thread-safe.

    Invariant: if head <= _limit, the data from head to _limit is free and contiguous. So most records cost one
    comparison; `_find_room` moves the limit.
    """

    def __init__(self, handle: RingHandle) -> None:
        self._map = RingMapping(handle, is_writer=True)
        self._acks = [self._map.map_ack(handle, i, is_reader=False) for i in range(self._map.num_readers)]
        self._wake_fds = [handle.wake_fds[i] for i in range(self._map.num_readers)]
        self._words, self._data, self._capacity = self._map.words, self._map.data, self._map.capacity
        self._fence = make_fence()
        self._head = self._limit = self._words[_HEAD]
        self._tails = [0] * self._map.num_readers
        self._free_until = self._capacity  # the highest head that the tails last seen allow
        self.closed = False

    @property
    def max_payload_bytes(self) -> int:
        """The largest single part that fits into a record."""
        return self._capacity // 2 - LINE

    def try_write(self, kind: int, parts: Sequence[Buffer]) -> bool:
        """Publishes one record. False if the slowest reader leaves no room (back-pressure).

        `parts` are at most `MAX_PARTS` one-dimensional byte buffers; they are copied. After a False the readers signal
        `space_fd` when they release. Raises `RecordTooLarge`, `RingClosed`, `RingCorruptError`.
        """
        if len(parts) == 1:  # the common case, in half of the time
            (part,) = parts
            size = len(part)
            need = LINE + ((size + 63) & -64)
            start = self._head
            if start + need > self._limit and (start := self._find_room(need)) < 0:
                return False
            data, at = self._data, start % self._capacity
            _HEADERS[1].pack_into(data, at, start, need, kind, 1, size)
            at += LINE
            data[at : at + size] = part
        else:
            sizes = list(map(len, parts))
            need = _bytes_of(sizes)
            start = self._head
            if start + need > self._limit and (start := self._find_room(need)) < 0:
                return False
            self._copy_many(start, need, kind, parts, sizes)
        if self._fence:
            self._fence()
        self._head = self._words[_HEAD] = start + need
        for fd in self._wake_fds:
            signal_event(fd)
        return True

    def _copy_many(self, start: int, need: int, kind: int, parts: Sequence[Buffer], sizes: list[int]) -> None:
        data, at, num_parts = self._data, start % self._capacity, len(sizes)
        _HEADERS[num_parts].pack_into(data, at, start, need, kind, num_parts, *sizes)
        at += _HEADER_BYTES[num_parts]
        for part, size in zip(parts, sizes, strict=True):
            data[at : at + size] = part
            at += (size + 63) & -64

    def _find_room(self, need: int) -> int:
        """Where a record of `need` bytes may begin: at the head or at the next lap's beginning; -1 without room.

        A lap's marker is written here and published with the record: readers do not expect a marker alone.
        """
        if self.closed:
            raise RingClosed
        if need > self._capacity // 2:
            raise RecordTooLarge
        skip = self._lap_rest(need)
        if not self._is_free(self._head + skip + need):
            return -1
        if skip:
            _HEADERS[0].pack_into(self._data, self._head % self._capacity, self._head, skip, _WRAP, 0)
            self._limit = 0
        else:
            self._limit = self._next_limit(need)
        return self._head + skip

    def _next_limit(self, need: int) -> int:
        """The head at which `_find_room` is needed again: lap end, half the ring, a restart at 0, or the last tails."""
        at = self._head % self._capacity
        restart = RESTART_BYTES if at < RESTART_BYTES else at + RESTART_BYTES // 16
        far = min(max(at + need, restart), at + self._capacity // 2, self._capacity)
        return min(self._free_until, self._head - at + far)

    def _lap_rest(self, need: int) -> int:
        """Bytes to skip so that a record of `need` bytes wraps around to 0; 0 if it fits at the head.

        A ring that all readers have emptied wraps around after each `RESTART_BYTES`, which stays in the CPU cache and
        keeps an idle ring's resident memory small. The record must not reach the marker that sends the readers to 0.
        """
        at = self._head % self._capacity
        rest = self._capacity - at
        if need > rest or (at >= RESTART_BYTES and need <= at and self._lowest_tail() == self._head):
            return rest
        return 0

    def _is_free(self, head: int) -> bool:
        """Whether everything below this head is free; if not, requests a signal from the readers."""
        if head <= self._free_until:
            return True
        self._words[_SPACE_WANTED] = 1  # before the tails are read
        self._free_until = self._lowest_tail() + self._capacity
        if head > self._free_until:
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

    def has_room(self, sizes: Sequence[int]) -> bool:
        """Whether `try_write` of parts of these sizes would succeed; if not, requests a readers' signal."""
        need = _bytes_of(sizes)
        return self._head + need <= self._limit or self._find_room(need) >= 0

    def lagging(self) -> list[int]:
        """The readers that have not released everything."""
        self._lowest_tail()
        return [i for i, tail in enumerate(self._tails) if tail < self._head]

    def unread_bytes(self) -> int:
        """What the slowest reader has not released."""
        return self._head - self._lowest_tail()

    def close(self) -> None:
        """Marks the ring as closed for the readers, and unmaps the memory. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self._limit = -1  # the next write calls `_find_room`, which raises
        if self._fence:
            self._fence()  # a reader that sees the word sees the last head
        self._words[_CLOSED] = 1
        for fd in self._wake_fds:
            signal_event(fd)
        self._map.close()


class RingReader:
    """The consumer `index`. Not thread-safe."""

    def __init__(self, handle: RingHandle, index: int) -> None:
        self._map = RingMapping(handle, is_writer=False)
        self._ack = self._map.map_ack(handle, index, is_reader=True)
        self._words, self._data, self._capacity = self._map.words, self._map.data, self._map.capacity
        self._space_fd = handle.space_fd
        self._fence = make_fence()
        self._position = self._ack[_TAIL]
        self._end = 0  # of the record on lease, else 0
        self.closed = False

    def has_record(self) -> bool:
        """Whether `try_read` would return a record or raise `RingClosed`."""
        return self.closed or self._words[_HEAD] != self._position or self._words[_CLOSED] != 0

    def spin(self, until: float, num_looks: int = 1) -> bool:
        """Spins, yielding the core after every `num_looks` looks, until a record has arrived; False at `until`
        (monotonic)."""
        words, position, now, let_others_run = self._words, self._position, time.monotonic, os.sched_yield
        looks = range(num_looks)
        while True:
            for _ in looks:
                if words[_HEAD] != position:
                    return True
            if now() >= until:
                return False
            let_others_run()

    def try_read(self) -> tuple[int, list[memoryview]] | None:
        """The next record's kind and parts, or None if there is none.

        The parts are read-only shared memory, valid until `release`, which must precede the next read.
        Raises `RingClosed` after the last record of a closed ring, `RingCorruptError` for invalid contents.
        """
        assert not self._end, "the previous record was not released"
        if self.closed:
            raise RingClosed
        position, head = self._position, self._words[_HEAD]
        if head == position:
            self._raise_if_finished()
            return None
        if self._fence:
            self._fence()
        if not position < head <= position + self._capacity:
            raise RingCorruptError(f"the ring's head is {head}, this reader is at {position}")
        # A header is at least a line, so the first part length can be read before the number of parts is known.
        data, at = self._data, position % self._capacity
        own, num_bytes, kind, num_parts, size = _HEADERS[1].unpack_from(data, at)
        if own != position or not LINE <= num_bytes <= head - position or at + num_bytes > self._capacity:
            raise RingCorruptError(f"record at {position} says {own}, {num_bytes} bytes; head is {head}")
        if num_parts == 1 and num_bytes == LINE + ((size + 63) & -64):  # the common case
            self._end = position + num_bytes
            return kind, [data[at + LINE : at + LINE + size]]
        if kind == _WRAP:
            return self._read_next_lap(position + num_bytes)
        parts = self._many_parts(at, num_bytes, num_parts)
        self._end = position + num_bytes
        return kind, parts

    def _read_next_lap(self, position: int) -> tuple[int, list[memoryview]]:
        """The record after a wrap-around marker that ends at `position`."""
        if position % self._capacity or self._position % self._capacity == 0:
            raise RingCorruptError(f"a marker at {self._position} ends at {position}, which begins no lap")
        self._position = position
        record = self.try_read()
        if record is None:
            raise RingCorruptError(f"a marker before {position} without a record after it")
        return record

    def _raise_if_finished(self) -> None:
        if self._words[_CLOSED]:
            if self._fence:
                self._fence()
            # Load the head again, after the word: records published before the close are still delivered.
            if self._words[_HEAD] == self._position:
                raise RingClosed

    def _many_parts(self, at: int, num_bytes: int, num_parts: int) -> list[memoryview]:
        """The parts of the record at this place, for other than one part. Every length is checked."""
        if num_parts > MAX_PARTS or num_bytes < _HEADERS[num_parts].size:
            raise RingCorruptError(f"a record of {num_bytes} bytes cannot have {num_parts} parts")
        place = at + _HEADER_BYTES[num_parts]
        parts = []
        for size in _HEADERS[num_parts].unpack_from(self._data, at)[4:]:
            parts.append(self._data[place : place + size])
            place += (size + 63) & -64
        if place != at + num_bytes:
            raise RingCorruptError(f"{num_parts} parts do not make a record of {num_bytes} bytes")
        return parts

    def release(self) -> None:
        """Releases the bytes of the last record to the writer."""
        assert self._end, "no record is on lease"
        if self.closed:
            return
        if self._fence:
            self._fence()
        self._position = self._ack[_TAIL] = self._end
        self._end = 0
        if self._words[_SPACE_WANTED]:
            signal_event(self._space_fd)

    def close(self) -> None:
        """Marks this reader as closed for the writer, and unmaps the memory. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self._ack[_READER_CLOSED] = 1
        signal_event(self._space_fd)
        self._map.close()
