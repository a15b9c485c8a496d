"""Shared memory that a peer has scribbled over: a typed error, or an order that holds; no crash and no hang."""

from __future__ import annotations

import functools
import os
import random
import struct

import pytest
from fuzzing import LENGTHS, Watch, mutated, owned

from ringcore.executor.near_queue import NearReader, NearWriter, create_queue
from ringcore.executor.ring_buffer import RingClosed, RingReader, RingWriter
from ringcore.executor.ring_memory import PAGE, RingCorruptError, RingMapping, create_ring
from ringcore.executor.status_board import LINE, StatusBoard, create_board

CAPACITY = 16 * PAGE


class Ring:
    def __init__(self) -> None:
        self.handle = create_ring(CAPACITY, 2)
        self.writer = RingWriter(self.handle)
        self.readers = [RingReader(self.handle, i) for i in range(2)]
        self._scribbler = RingMapping(self.handle, is_writer=True)
        self.control, self.data = self._scribbler.words, self._scribbler.data
        self.acks = [self._scribbler.map_ack(self.handle, i, is_reader=True) for i in range(2)]

    def close(self) -> None:
        self._scribbler.close()
        self.writer.close()
        for reader in self.readers:
            reader.close()
        self.handle.close()


def wild_word(rng: random.Random, near: int) -> int:
    return rng.choice([rng.choice(LENGTHS), near + rng.randrange(-300, 300), rng.randrange(1 << 64), near + 64]) % (
        1 << 64
    )


def test_control_pages(num_malformed, seed):
    """A corrupt head, tail, flag or capacity: a typed error or an order that holds, never a wait without end."""
    rng, watch = random.Random(seed), Watch()
    ring = Ring()
    num_since = 0
    while watch.num_attempts < num_malformed:
        if rng.random() < 0.5:
            words = ring.control
            at = rng.choice([8, 8, 8, 16, 24, rng.randrange(len(words))])
        else:
            words = rng.choice(ring.acks)
            at = rng.choice([0, 0, 0, 8, rng.randrange(len(words))])
        with watch.attempt(RingCorruptError, RingClosed):
            words[at] = wild_word(rng, words[at])
            use(ring, rng)
            num_since += 1
            if num_since < 20:
                continue
        ring.close()
        ring, num_since = Ring(), 0
    ring.close()
    watch.check(num_malformed)


def use(ring: Ring, rng: random.Random) -> None:
    """Each end, in any order: whoever comes first meets what was scribbled."""

    def write() -> None:
        ring.writer.try_write(1, [bytes(rng.choice([0, 10, 5000]))] * rng.choice([1, 2]))

    def read(reader: RingReader) -> None:
        if (record := reader.try_read()) is not None:
            assert sum(map(len, record[1])) <= CAPACITY
            reader.release()

    ends = [write, *(functools.partial(read, reader) for reader in ring.readers)] * 2
    rng.shuffle(ends)
    for end in ends:
        end()


def test_a_page_that_is_no_ring_is_refused(num_malformed, seed):
    rng = random.Random(seed)
    for _ in range(num_malformed // 20):
        handle = create_ring(PAGE, 1)
        scribbler = RingMapping(handle, is_writer=True)
        before = list(scribbler.words[:4])
        at = rng.randrange(3)
        scribbler.words[at] = wild_word(rng, scribbler.words[at])
        if list(scribbler.words[:4]) != before:
            with pytest.raises(RingCorruptError):
                RingReader(handle, 0)
        scribbler.close()
        handle.close()


def test_records(num_malformed, seed):
    rng, watch = random.Random(seed), Watch()
    ring = Ring()
    while watch.num_attempts < num_malformed:
        start = ring.control[8] % CAPACITY
        written = ring.writer.try_write(1, [rng.randbytes(rng.randrange(200)) for _ in range(rng.choice([1, 1, 3]))])
        with watch.attempt(RingCorruptError, RingClosed):
            if written:
                header = mutated(bytes(ring.data[start : start + 64]), rng)[:64]
                ring.data[start : start + len(header)] = header
            for reader in ring.readers:
                if (record := reader.try_read()) is not None:
                    assert sum(map(len, record[1])) <= CAPACITY
                    reader.release()
            continue
        ring.close()
        ring = Ring()
    ring.close()
    watch.check(num_malformed)


def test_stubs_of_large_messages(num_malformed, seed):
    """The side channel's stub and table, which a reader believes no more than a record."""
    rng, watch = random.Random(seed), Watch()
    handle = create_queue(CAPACITY, 1)
    raw, reader = RingWriter(handle.ring), NearReader(handle, 0)
    sender = NearWriter(handle)
    stub = struct.pack("<QQ", 1, 5)
    num_messages = max(200, num_malformed // 20)
    while watch.num_attempts < num_messages:
        kind = rng.choice([1, 2, 2, 2, 3, 65535])
        with watch.attempt(RingCorruptError, RingClosed):
            assert raw.try_write(kind, [mutated(stub, rng)[:64]] * rng.choice([1, 1, 2]))
            with reader.try_receive() as parts:
                owned(parts)
            continue
        for end in (raw, sender, reader):
            end.close()
        handle.close()
        handle = create_queue(CAPACITY, 1)
        raw, reader = RingWriter(handle.ring), NearReader(handle, 0)
        sender = NearWriter(handle)
    for end in (raw, sender, reader):
        end.close()
    handle.close()
    watch.check(num_messages)


def test_status_pages(num_malformed, seed):
    """Whatever a worker scribbles there, its parent reads a status."""
    rng = random.Random(seed)
    fd = create_board(2)
    board = StatusBoard(fd, 2)
    for _ in range(num_malformed):
        os.pwrite(fd, rng.randbytes(rng.choice([8, LINE])), rng.choice([0, LINE, rng.randrange(2 * LINE)]))
        for rank in (0, 1):
            status = board.read(rank)
            assert isinstance(status.method, str)
            assert status.num_calls >= 0
    os.close(fd)
