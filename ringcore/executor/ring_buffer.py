"""A lock-free broadcast ring buffer in shared memory: one producer (writer), a fixed set of consumers (readers)."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Sequence

from ringcore.executor.memory_order import make_fence
from ringcore.executor.ring_memory import RingCorruptError, RingHandle, RingMapping
from ringcore.executor.waiting import signal_event

__all__ = ["LINE", "MAX_PARTS", "Buffer", "RecordTooLarge", "RingClosed", "RingReader", "RingWriter"]

Buffer = bytes | bytearray | memoryview

LINE = 64  # bytes of a cache line; records and their parts begin at multiples of it
MAX_PARTS = 64
RESTART_BYTES = 1 << 20

# Words (u64) of the control page; each has its own cache line (no false sharing).
_HEAD, _CLOSED, _SPACE_WANTED = 8, 16, 24
# Words of a reader's own page.
_TAIL, _READER_CLOSED = 0, 8

# A record's header: own position u64, bytes of the record u32, kind u16, parts u16, then the bytes of each part u32.
_HEADERS = [struct.Struct(f"<QIHH{n}I") for n in range(MAX_PARTS + 1)]
_HEADER_BYTES = [-(-header.size // LINE) * LINE for header in _HEADERS]
_WRAP = 0  # the kind of the wrap-around marker (padding up to the end of the data); callers' kinds start at 1


class RingClosed(Exception):
    """The peer or this end has closed the ring."""


class RecordTooLarge(Exception):
    """A record of more than half the ring: with the wrap-around padding it might never fit."""


# Shared words. Each has a single writer, is aligned, and is stored and loaded atomically.
#
#   word            where             writer    meaning
#   --------------  ----------------  --------  ----------------------------------------------------------------
#   head            control page      writer    bytes published so far; offset in the data = head % capacity
#   tail            reader's page     reader    bytes released so far: tail <= head <= tail + capacity
#   closed          control page      writer    end of stream; readers drain the ring, then get `RingClosed`
#   closed          reader's page     reader    it has left; the writer gets `RingClosed` instead of waiting
#   space_wanted    control page      writer    it waits for space: a reader that releases writes `space_fd`
#
# States of a byte range, the order of stores, loads and fences, and the transitions:
#
#   state               writer (producer)                   reader (consumer)             next
#   ------------------  ----------------------------------  ----------------------------  -------------------------
#   free                may write it                        never loads it                written
#   written             marker (if any), record; fence      not visible: past head        published: head stored
#   published           never touches it; head, wake_fds    head loaded; fence; reads it  on lease
#   on lease            never touches it                    parts are valid               released: fence, tail stored
#   released            tails loaded; fence                 checks space_wanted           free, once all have released
#
# So a reader never sees a byte of an unpublished record, the writer never overwrites a byte that a reader still needs,
# and the death of either leaves no torn record. On x86-64 (TSO) stores become visible in program order and loads are
# executed in program order, so the fences are no-ops there. ARM may reorder both: there each is a full memory fence
# (see memory_order).
#
# Records are 64-byte aligned and contiguous (never split at the end): a header of one line (more for many parts), then
# each part, 64-byte aligned. Wrap-around: where a record does not fit before the end of the data, a marker (kind 0)
# pads up to the end and the record begins at offset 0. The padding counts in head and tail like a record, so the
# slowest reader gates both.
#
# A store (tail, or space_wanted) followed by a load of the peer's word may be reordered even on x86-64. So one wake of
# the *writer* may be lost; a writer that waits for space therefore sleeps at most `SPACE_TICK_S` at a time. A wake of a
# reader cannot be lost: the writer always writes its eventfd, after the head, by a system call that orders both.


def _bytes_of(sizes: Sequence[int]) -> int:
    """Bytes of a record with parts of these sizes."""
    num_bytes = _HEADER_BYTES[len(sizes)]
    for size in sizes:
        num_bytes += (size + 63) & -64
    return num_bytes


class RingWriter:
    """The writing end (producer). Not thread-safe.

    Invariant: if head <= _limit, the data from head to _limit is free and contiguous. So most records cost one
    comparison; `_find_room` advances the limit.
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
        """Publishes one record. False if the ring is full (back-pressure of the slowest reader).

        `parts` are at most `MAX_PARTS` one-dimensional byte buffers; they are copied. After a False the readers write
        `space_fd` as they release. Raises `RecordTooLarge`, `RingClosed`, `RingCorruptError`.
        """
        if len(parts) == 1:  # the common case: it halves the time
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
        """The position for a record of `need` bytes: the head, or the wrap-around to offset 0; -1 if the ring is full.

        The wrap marker is written here and published with the record: readers do not expect a marker alone.
        """
        if self.closed:
            raise RingClosed
        if need > self._capacity // 2:
            raise RecordTooLarge
        skip = self._wrap_padding(need)
        if not self._is_free(self._head + skip + need):
            return -1
        if skip:
            _HEADERS[0].pack_into(self._data, self._head % self._capacity, self._head, skip, _WRAP, 0)
            self._limit = 0
        else:
            self._limit = self._next_limit(need)
        return self._head + skip

    def _next_limit(self, need: int) -> int:
        """The next position at which to call `_find_room`: the end of the data, half the ring, or an early wrap."""
        at = self._head % self._capacity
        restart = RESTART_BYTES if at < RESTART_BYTES else at + RESTART_BYTES // 16
        far = min(max(at + need, restart), at + self._capacity // 2, self._capacity)
        return min(self._free_until, self._head - at + far)

    def _wrap_padding(self, need: int) -> int:
        """Padding bytes before a record of `need` bytes: up to the end of the data for a wrap-around to 0, else 0.

        A ring that every reader has emptied wraps early, after each `RESTART_BYTES`: that stays in the CPU cache and
        keeps an idle ring's resident memory small. The record must not overlap the marker that sends the readers to 0.
        """
        at = self._head % self._capacity
        rest = self._capacity - at
        if need > rest or (at >= RESTART_BYTES and need <= at and self._lowest_tail() == self._head):
            return rest
        return 0

    def _is_free(self, head: int) -> bool:
        """Whether all bytes below this head are free; if not, requests a signal from the readers (space_wanted)."""
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

    def has_room(self, num_bytes: int) -> bool:
        """Whether `try_write` of one part of `num_bytes` would succeed now; if not, requests a readers' signal."""
        need = _bytes_of([num_bytes])
        return self._head + need <= self._limit or self._find_room(need) >= 0

    def lagging(self) -> list[int]:
        """The slow readers: those that have not released every record."""
        self._lowest_tail()
        return [i for i, tail in enumerate(self._tails) if tail < self._head]

    def close(self) -> None:
        """Signals end of stream to the readers and unmaps the memory. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self._limit = -1  # the next write calls `_find_room`, which raises
        if self._fence:
            self._fence()  # a reader that sees the closed word sees the last head
        self._words[_CLOSED] = 1
        for fd in self._wake_fds:
            signal_event(fd)
        self._map.close()


class RingReader:
    """The reading end (consumer) `index`. Not thread-safe."""

    def __init__(self, handle: RingHandle, index: int) -> None:
        self._map = RingMapping(handle, is_writer=False)
        self._ack = self._map.map_ack(handle, index, is_reader=True)
        self._words, self._data, self._capacity = self._map.words, self._map.data, self._map.capacity
        self._space_fd = handle.space_fd
        self._fence = make_fence()
        self._position = self._ack[_TAIL]
        self._end = 0  # of the record that is on lease, else 0
        self.closed = False

    def has_record(self) -> bool:
        """Whether `try_read` would return a record or raise `RingClosed`."""
        return self.closed or self._words[_HEAD] != self._position or self._words[_CLOSED] != 0

    def spin(self, until: float) -> bool:
        """Spins on the head, with sched_yield, until a record is published; False at `until` (monotonic)."""
        words, position, now, yield_core = self._words, self._position, time.monotonic, os.sched_yield
        while words[_HEAD] == position:
            if now() >= until:
                return False
            yield_core()
        return True

    def try_read(self) -> tuple[int, list[memoryview]] | None:
        """The next record's kind and parts, or None if the ring is empty.

        The parts are read-only views of shared memory, valid until `release`, which must come before the next read.
        Raises `RingClosed` after the last record of a closed ring, `RingCorruptError` for an inconsistent header.
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
        # A header is at least one line: the first length can be read before the number of parts is known.
        data, at = self._data, position % self._capacity
        own, num_bytes, kind, num_parts, size = _HEADERS[1].unpack_from(data, at)
        if own != position or not LINE <= num_bytes <= head - position or at + num_bytes > self._capacity:
            raise RingCorruptError(f"record at {position} says {own}, {num_bytes} bytes; head is {head}")
        if num_parts == 1 and num_bytes == LINE + ((size + 63) & -64):  # the common case
            self._end = position + num_bytes
            return kind, [data[at + LINE : at + LINE + size]]
        if kind == _WRAP:
            return self._read_after_wrap(position + num_bytes)
        parts = self._many_parts(at, num_bytes, num_parts)
        self._end = position + num_bytes
        return kind, parts

    def _read_after_wrap(self, position: int) -> tuple[int, list[memoryview]]:
        """The record at offset 0, after a wrap marker that ends at `position`."""
        if position % self._capacity or self._position % self._capacity == 0:
            raise RingCorruptError(f"a wrap marker at {self._position} ends at {position}, not at the end of the data")
        self._position = position
        record = self.try_read()
        if record is None:
            raise RingCorruptError(f"a wrap marker before {position} without a record after it")
        return record

    def _raise_if_finished(self) -> None:
        if self._words[_CLOSED]:
            if self._fence:
                self._fence()
            # Reload the head after the closed word: records published before the close are still delivered.
            if self._words[_HEAD] == self._position:
                raise RingClosed

    def _many_parts(self, at: int, num_bytes: int, num_parts: int) -> list[memoryview]:
        """The parts of the record at offset `at` with none or several parts. Every length is checked."""
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
        """Releases the bytes of the leased record to the writer (advances the tail)."""
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
        """Signals the writer that this reader has left, and unmaps the memory. Idempotent."""
        if self.closed:
            return
        self.closed = True
        self._ack[_READER_CLOSED] = 1
        signal_event(self._space_fd)
        self._map.close()
