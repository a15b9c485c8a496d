"""The ring with both ends in this process: what the ends see of each other is the shared memory alone."""

from __future__ import annotations

import os
import random
from array import array

import pytest

from ringcore.executor import ring_memory
from ringcore.executor.ring_buffer import (
    LINE,
    MAX_PARTS,
    RESTART_BYTES,
    RecordTooLarge,
    RingClosed,
    RingReader,
    RingWriter,
)
from ringcore.executor.ring_memory import PAGE, RingCorruptError, create_ring

CAPACITY = 4 * PAGE
KIND = 1


@pytest.fixture(params=["memfd", "named"], autouse=True)
def memory(request, monkeypatch):
    """Every test with the kernel's unnamed memory, and with files that lose their name, where there is none."""
    if request.param == "named":
        monkeypatch.setattr(ring_memory, "HAS_MEMFD", False)
    return request.param


class Ring:
    def __init__(self, capacity: int = CAPACITY, num_readers: int = 1) -> None:
        self.handle = create_ring(capacity, num_readers)
        self.writer = RingWriter(self.handle)
        self.readers = [RingReader(self.handle, i) for i in range(num_readers)]

    def read(self, index: int = 0) -> bytes | None:
        record = self.readers[index].try_read()
        if record is None:
            return None
        payload = b"".join(record[1])
        self.readers[index].release()
        return payload

    def close(self) -> None:
        self.writer.close()
        for reader in self.readers:
            reader.close()
        self.handle.close()


@pytest.fixture
def ring():
    ring = Ring()
    yield ring
    ring.close()


@pytest.fixture
def three():
    ring = Ring(num_readers=3)
    yield ring
    ring.close()


HALF = CAPACITY // 2 - LINE  # the largest part


def test_parts_stay_apart_and_are_aligned(ring):
    for num_parts in (0, 1, 2, 3, 4, 12, 13, 29, MAX_PARTS):
        parts = [bytes([i]) * (i * 7 % 90) for i in range(num_parts)]
        assert ring.writer.try_write(KIND, parts)
        _, received = ring.readers[0].try_read()
        assert [bytes(part) for part in received] == parts
        ring.readers[0].release()


@pytest.mark.parametrize("num_bytes", [HALF + 1, CAPACITY, 4 * CAPACITY])
def test_a_record_above_half_the_ring_is_refused_at_once(ring, num_bytes):
    for before in (0, 3000, HALF):
        assert ring.writer.try_write(KIND, [bytes(before)])
        with pytest.raises(RecordTooLarge):
            ring.writer.try_write(KIND, [bytes(num_bytes)])
        assert ring.read() == bytes(before)


def test_a_part_that_is_no_byte_buffer_leaves_the_ring_as_it_was(ring):
    """Also where its record would have begun a new lap: the marker is published with a record or not at all."""
    for num_before in range(20):
        for _ in range(num_before):
            assert ring.writer.try_write(KIND, [bytes(900)])
            ring.read()
        with pytest.raises((ValueError, TypeError)):
            ring.writer.try_write(KIND, [memoryview(array("d", range(900)))])
        assert ring.read() is None
        assert ring.writer.lagging() == []
        assert ring.writer.try_write(KIND, [bytes(HALF)])
        assert ring.read() == bytes(HALF)


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 1000, HALF - 1, HALF])
def test_a_record_of_any_size_again_and_again(ring, size):
    assert ring.writer.max_payload_bytes == HALF
    for _ in range(50):
        data = os.urandom(size)
        assert ring.writer.try_write(KIND, [data])
        assert ring.read() == data
        assert ring.read() is None


def test_every_mixture_of_sizes_over_thousands_of_laps(three):
    """Readers at different speeds; each sees every record once, in order, unharmed."""
    rng = random.Random(5)
    sizes = [0, 1, 63, 64, 65, 500, 3000, HALF - 1, HALF]
    sent: list[bytes] = []
    received: list[list[bytes]] = [[], [], []]
    num_refused = 0
    data = b""
    while len(sent) < 6000:
        if three.writer.try_write(KIND, [data]):
            sent.append(data)
            data = rng.randbytes(rng.choice(sizes))
            continue
        num_refused += 1
        index = rng.choice(three.writer.lagging())
        for _ in range(rng.randint(1, 4)):
            payload = three.read(index)
            if payload is not None:
                received[index].append(payload)
    for index in range(3):
        while (payload := three.read(index)) is not None:
            received[index].append(payload)
    assert received == [sent, sent, sent]
    assert num_refused > 100
    assert sum(map(len, sent)) > 500 * CAPACITY


def test_the_slowest_reader_gates(three):
    payload = bytes(HALF)
    assert three.writer.try_write(KIND, [payload])
    assert three.writer.try_write(KIND, [payload])
    assert not three.writer.try_write(KIND, [b""])
    for index in (0, 2):
        assert three.read(index) == payload
    assert not three.writer.try_write(KIND, [b""])
    assert three.writer.lagging() == [0, 1, 2]
    assert three.read(1) == payload
    assert three.writer.try_write(KIND, [b""])


def test_a_record_on_lease_is_never_overwritten(ring):
    assert ring.writer.try_write(KIND, [b"A" * HALF])
    _, [payload] = ring.readers[0].try_read()
    num_written = 0
    while ring.writer.try_write(KIND, [b"B" * 1000]):
        num_written += 1
    assert num_written == (CAPACITY // 2) // (LINE + 1024)
    assert bytes(payload) == b"A" * HALF


def test_a_drained_ring_starts_again_without_touching_its_marker():
    """The restart at 0 writes a marker where the readers are, which a long record must not reach."""
    ring = Ring(4 * RESTART_BYTES, num_readers=2)
    rng = random.Random(9)
    sizes = [RESTART_BYTES // 3, RESTART_BYTES - LINE, RESTART_BYTES + 1, ring.writer.max_payload_bytes]
    for i in range(120):
        data = bytes([i]) * rng.choice(sizes)
        assert ring.writer.try_write(KIND, [data])  # a drained ring takes any record
        assert ring.read(0) == data
        assert ring.read(1) == data
    ring.close()


def test_small_records_stay_in_the_beginning_of_a_large_ring():
    """What is never touched is never resident."""
    ring = Ring(8 * RESTART_BYTES)
    places = set()
    for _ in range(3 * RESTART_BYTES // 8192):
        assert ring.writer.try_write(KIND, [bytes(8000)])
        places.add(ring.readers[0]._position % (8 * RESTART_BYTES))
        ring.read()
    assert max(places) <= RESTART_BYTES + 8192
    ring.close()


def test_the_sender_may_reuse_its_buffer(ring):
    buffer = bytearray(b"first")
    assert ring.writer.try_write(KIND, [buffer])
    buffer[:] = b"xxxxx"
    assert ring.read() == b"first"


def test_kinds_arrive(ring):
    for kind in (1, 2, 77):
        assert ring.writer.try_write(kind, [b"x"])
        assert ring.readers[0].try_read()[0] == kind
        ring.readers[0].release()


def test_the_payload_is_read_only(ring):
    assert ring.writer.try_write(KIND, [b"x"])
    _, [payload] = ring.readers[0].try_read()
    assert payload.readonly


def test_readers_take_what_was_published_before_the_close(ring):
    assert ring.writer.try_write(KIND, [b"last"])
    ring.writer.close()
    assert ring.read() == b"last"
    with pytest.raises(RingClosed):
        ring.readers[0].try_read()
    with pytest.raises(RingClosed):
        ring.writer.try_write(KIND, [b""])


def test_a_writer_without_room_learns_that_a_reader_has_closed(ring):
    while ring.writer.try_write(KIND, [bytes(1000)]):
        pass
    ring.readers[0].close()
    with pytest.raises(RingClosed):
        ring.writer.try_write(KIND, [bytes(1000)])


def test_a_release_wakes_a_writer_that_waits_and_no_other(ring):
    assert ring.writer.try_write(KIND, [b"x"])
    ring.read()
    with pytest.raises(BlockingIOError):
        os.eventfd_read(ring.handle.space_fd)
    while ring.writer.try_write(KIND, [bytes(1000)]):
        pass
    ring.read()
    assert os.eventfd_read(ring.handle.space_fd) == 1


def test_every_record_wakes_its_readers(three):
    assert three.writer.try_write(KIND, [b"x"])
    assert [os.eventfd_read(three.handle.wake_fds[i]) for i in range(3)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("offset", "value"),
    [
        (PAGE, 64),  # the record's position
        (PAGE + 8, 1 << 31),  # its length
        (PAGE + 8, CAPACITY),
        (PAGE + 8, 0),
        (PAGE + 12, 0),  # its kind: a marker in the middle of a lap
        (PAGE + 12, KIND | (MAX_PARTS + 1) << 16),  # its number of parts
        (PAGE + 12, KIND | MAX_PARTS << 16),
        (PAGE + 12, KIND),
        (PAGE + 16, 65),  # the length of its part
        (PAGE + 16, 1 << 31),
        (64, 2 * CAPACITY),  # the head
        (64, 1),
    ],
)
def test_a_corrupt_word_is_an_error_and_not_a_record(ring, offset, value):
    assert ring.writer.try_write(KIND, [b"hello"])
    assert ring.writer.try_write(KIND, [b"world"])
    os.pwrite(ring.handle.memory_fd, value.to_bytes(4, "little"), offset)
    with pytest.raises(RingCorruptError):
        all(ring.read() is not None for _ in range(3))


@pytest.mark.parametrize("tail", [1, 64, 1 << 40])
def test_a_reader_cannot_release_what_was_never_written(ring, tail):
    os.pwrite(ring.handle.acks_fd, tail.to_bytes(8, "little"), 0)
    with pytest.raises(RingCorruptError):
        ring.writer.lagging()


def test_the_memory_is_the_owners_alone_and_has_no_name(ring):
    for fd in (ring.handle.memory_fd, ring.handle.acks_fd):
        assert os.fstat(fd).st_mode & 0o777 == 0o600
        assert os.readlink(f"/proc/self/fd/{fd}").endswith(" (deleted)")
        assert not os.get_inheritable(fd)


@pytest.mark.parametrize("offset", [0, 8, 16])
def test_memory_that_is_no_ring_is_refused(offset):
    handle = create_ring(PAGE, 1)
    os.pwrite(handle.memory_fd, b"\xff" * 8, offset)
    with pytest.raises(RingCorruptError):
        RingReader(handle, 0)
    handle.close()


def test_the_memory_cannot_change_its_size(ring, memory):
    if memory == "named":
        pytest.skip("a plain file cannot be sealed")
    for size in (0, 100 * PAGE):
        with pytest.raises(PermissionError):
            os.ftruncate(ring.handle.memory_fd, size)


def test_memory_order_has_a_fence_for_every_machine():
    from ringcore.executor.memory_order import make_fence

    assert make_fence(is_strongly_ordered=True) is None
    fence = make_fence(is_strongly_ordered=False)
    assert fence is not None
    assert fence() is None


def test_the_ring_works_with_a_fence(monkeypatch):
    calls = []
    monkeypatch.setattr("ringcore.executor.ring_buffer.make_fence", lambda: lambda: calls.append(1))
    ring = Ring()
    for i in range(100):
        assert ring.writer.try_write(KIND, [bytes([i]) * 999])
        assert ring.read() == bytes([i]) * 999
    assert len(calls) >= 300  # before the head, after the head, before the tail
    ring.close()


class Looked:
    """Words that count how often they are read."""

    def __init__(self, words: memoryview) -> None:
        self._words, self.num = words, 0

    def __getitem__(self, index: int) -> int:
        self.num += 1
        return self._words[index]


@pytest.mark.parametrize("num_looks", [1, 5])
def test_a_spin_yields_after_so_many_looks_and_sees_what_came_meanwhile(ring, monkeypatch, num_looks):
    reader = ring.readers[0]
    looked = Looked(reader._words)
    looks_at_yields = []

    def other_runs() -> None:
        looks_at_yields.append(looked.num)
        if len(looks_at_yields) == 3:
            assert ring.writer.try_write(KIND, [b"came"])

    monkeypatch.setattr("os.sched_yield", other_runs)
    monkeypatch.setattr(reader, "_words", looked)
    assert reader.spin(float("inf"), num_looks)
    assert looks_at_yields == [num_looks, 2 * num_looks, 3 * num_looks]
    assert looked.num == 3 * num_looks + 1
    assert ring.read() == b"came"


@pytest.mark.parametrize("num_looks", [1, 5])
def test_a_spin_until_a_moment_that_has_passed_only_looks(ring, monkeypatch, num_looks):
    yields = []
    monkeypatch.setattr("os.sched_yield", lambda: yields.append(1))
    reader = ring.readers[0]
    assert not reader.spin(0.0, num_looks)
    assert ring.writer.try_write(KIND, [b"x"])
    assert reader.spin(0.0, num_looks)
    assert yields == []
