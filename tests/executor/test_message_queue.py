"""Messages with both ends in this process, or one end in a thread."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import struct
import threading
import time

import numpy as np
import pytest

from ringcore.errors import CapacityError, InvalidRequestError
from ringcore.executor import message_queue, near_queue, ring_memory, side_channel
from ringcore.executor.near_queue import NearReader, NearWriter, QueueHandle, create_queue
from ringcore.executor.ring_buffer import RingClosed
from ringcore.executor.ring_memory import PAGE, RingCorruptError
from ringcore.executor.waiting import DeadlinePassed, PeerDied

CAPACITY = 16 * PAGE


@pytest.fixture(params=["memfd", "named"], autouse=True)
def memory(request, monkeypatch):
    """Every test with the kernel's unnamed memory, and with files that lose their name, where there is none."""
    if request.param == "named":
        monkeypatch.setattr(ring_memory, "HAS_MEMFD", False)
    return request.param


class Queue:
    def __init__(self, num_readers: int = 1, capacity: int = CAPACITY, deaths: tuple[int, ...] = ()) -> None:
        self.handle = create_queue(capacity, num_readers)
        self.writer = NearWriter(self.handle, deaths)
        self.readers = [NearReader(self.handle, i, deaths) for i in range(num_readers)]

    def receive(self, index: int = 0) -> list[bytes] | None:
        message = self.readers[index].try_receive()
        if message is None:
            return None
        with message as parts:
            return [bytes(part) for part in parts]

    def close(self) -> None:
        self.writer.close()
        for reader in self.readers:
            reader.close()
        self.handle.close()


@pytest.fixture
def queue():
    queue = Queue(num_readers=2)
    yield queue
    queue.close()


@pytest.mark.parametrize(
    "size", [0, 1, 63, 64, 65, CAPACITY // 2 - 128, CAPACITY // 2, CAPACITY // 2 + 1, 2 * CAPACITY, 100 * CAPACITY]
)
def test_a_message_of_any_size(queue, size):
    for _ in range(5):
        sent = [os.urandom(16), os.urandom(size)]
        assert queue.writer.try_send(sent)
        assert queue.receive(0) == sent
        assert queue.receive(1) == sent
        assert queue.receive(0) is None


def test_large_and_small_messages_keep_their_order(queue):
    rng = random.Random(3)
    received: list[list[list[bytes]]] = [[], []]
    sent: list[list[bytes]] = []
    num_large = 0
    parts: list[bytes] = []
    while len(sent) < 1500:
        if queue.writer.try_send(parts):
            sent.append(parts)
            num_large += sum(map(len, parts)) > CAPACITY // 2
            parts = [rng.randbytes(rng.choice([0, 1, 64, 65, 5000, CAPACITY])) for _ in range(rng.randint(0, 4))]
            continue
        for index in (0, 1):
            for _ in range(rng.randint(1, 5)):
                if (message := queue.receive(index)) is not None:
                    received[index].append(message)
    for index in (0, 1):
        while (message := queue.receive(index)) is not None:
            received[index].append(message)
    assert received == [sent, sent]
    assert num_large > 100


@pytest.mark.parametrize("size", [100, 4 * CAPACITY])
def test_what_was_received_never_changes(queue, size):
    sent = [os.urandom(size) for _ in range(3)]
    kept = []
    for data in sent:
        assert queue.writer.try_send([data])
        kept.append(queue.receive(0)[0])
        queue.receive(1)
    passed = 0
    while passed < 10 * CAPACITY:
        assert queue.writer.try_send([b"\xff" * 20000])
        passed += len(queue.receive(0)[0])
        queue.receive(1)
    assert kept == sent


def test_parts_end_with_the_lease_and_are_aligned(queue):
    assert queue.writer.try_send([b"a" * 3, memoryview(np.arange(5.0)).cast("B"), bytearray(b"c")])
    with queue.readers[0].try_receive() as parts:
        view = parts[1]
        array = np.frombuffer(view, dtype=np.float64)
        assert array.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
        assert array.ctypes.data % 64 == 0
        assert view.readonly
        del array
    with pytest.raises(ValueError, match="released"):
        view[0]


def test_the_sender_may_reuse_its_buffers(queue):
    for size in (10, 2 * CAPACITY):
        buffer = bytearray(b"a" * size)
        assert queue.writer.try_send([buffer])
        buffer[:] = b"b" * size
        assert queue.receive(0) == [b"a" * size]
        assert queue.receive(1) == [b"a" * size]


def test_an_interrupted_reader_gives_the_memory_back(queue):
    for _ in range(20):
        assert queue.writer.try_send([bytes(20000)])
        queue.receive(1)
        with pytest.raises(ZeroDivisionError), queue.readers[0].try_receive():
            raise ZeroDivisionError


def test_large_messages_under_way_are_bounded(queue):
    num_sent = 0
    while queue.writer.try_send([bytes(CAPACITY)]):
        num_sent += 1
    assert 1 <= num_sent <= 8
    for _ in range(num_sent):
        assert queue.receive(0) == [bytes(CAPACITY)]
    assert not queue.writer.try_send([bytes(CAPACITY)])  # the other reader has not taken them
    for _ in range(num_sent):
        assert queue.receive(1) == [bytes(CAPACITY)]
    assert queue.writer.try_send([bytes(CAPACITY)])


def test_a_transfer_that_was_given_up_is_dropped(queue, monkeypatch):
    send_fds, num_calls = side_channel.socket.send_fds, 0

    def failing(*args):
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:  # the first reader got its descriptor, the second one's socket refuses
            raise BlockingIOError
        return send_fds(*args)

    monkeypatch.setattr(side_channel.socket, "send_fds", failing)
    assert not queue.writer.try_send([b"x" * CAPACITY])
    assert queue.writer.try_send([b"y" * CAPACITY])
    assert queue.receive(0) == [b"y" * CAPACITY]
    assert queue.receive(1) == [b"y" * CAPACITY]


def test_a_stub_without_its_descriptor_is_corrupt(queue):
    queue.writer._ring.try_write(near_queue._LARGE, [struct.pack("<QQ", 1, 10)])
    with pytest.raises(RingCorruptError, match="did not come"):
        queue.receive(0)


@pytest.mark.parametrize(
    "payload",
    [
        struct.pack("<I", 3),
        struct.pack("<I", 1 << 31),
        struct.pack("<II", 1, 1 << 20),
        struct.pack("<III", 2, 0, 1 << 31),
    ],
)
def test_a_message_whose_lengths_cannot_be_is_corrupt(queue, payload):
    queue.writer._side.try_send([payload, bytes(8)], len(payload) + 8)
    stub = struct.pack("<QQ", 1, len(payload) + 8)
    queue.writer._ring.try_write(near_queue._LARGE, [stub])
    with pytest.raises(RingCorruptError):
        queue.receive(0)


def test_a_message_that_is_too_large(queue, monkeypatch):
    monkeypatch.setattr(message_queue, "MAX_MESSAGE_BYTES", 2 * CAPACITY)
    with pytest.raises(InvalidRequestError, match="in pieces") as caught:
        queue.writer.try_send([bytes(2 * CAPACITY)])
    assert caught.value.details["value"] > 2 * CAPACITY


@pytest.mark.parametrize("calls", [["memfd_create", "open"], ["posix_fallocate"]])  # open: where there is no memfd
@pytest.mark.parametrize("number", [errno.ENOMEM, errno.ENOSPC, errno.EMFILE])
def test_no_memory_for_a_large_message(queue, monkeypatch, calls, number):
    def refuse(*args):
        raise OSError(number, os.strerror(number))

    num_fds = len(os.listdir("/proc/self/fd"))
    for call in calls:
        monkeypatch.setattr(os, call, refuse)
    with pytest.raises(CapacityError, match=os.strerror(number)):
        queue.writer.try_send([bytes(CAPACITY)])
    with pytest.raises(CapacityError):
        create_queue(CAPACITY, 1)
    assert len(os.listdir("/proc/self/fd")) == num_fds


def refuse_to_seal(monkeypatch, num_files):
    """The kernel holds pages of the first so many files for longer than anybody waits."""
    real, held = fcntl.fcntl, []

    def busy(fd, command, argument=0):
        if command == fcntl.F_ADD_SEALS and argument & fcntl.F_SEAL_WRITE:
            inode = os.fstat(fd).st_ino
            if inode not in held and len(held) < num_files:
                held.append(inode)
            if inode in held:
                raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        return real(fd, command, argument)

    monkeypatch.setattr(ring_memory, "HAS_MEMFD", True)
    monkeypatch.setattr(ring_memory, "BUSY_S", 0.001)
    monkeypatch.setattr(fcntl, "fcntl", busy)
    return held


def test_pages_that_cannot_be_sealed_are_left_for_new_ones(monkeypatch):
    queue = Queue(num_readers=1)
    held = refuse_to_seal(monkeypatch, 2)
    num_fds = len(os.listdir("/proc/self/fd"))
    data = os.urandom(4 * CAPACITY)
    assert queue.writer.try_send([data])
    assert queue.receive(0) == [data]
    assert len(held) == 2
    assert len(os.listdir("/proc/self/fd")) == num_fds
    queue.close()


def test_a_kernel_that_seals_nothing_is_told(monkeypatch):
    queue = Queue(num_readers=1)
    refuse_to_seal(monkeypatch, 1000)
    num_fds = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CapacityError, match="busy"):
        queue.writer.try_send([bytes(4 * CAPACITY)])
    assert len(os.listdir("/proc/self/fd")) == num_fds
    queue.close()


@pytest.mark.parametrize("deadline_s", [0.0, 0.02])
def test_waits_end_at_the_deadline(queue, deadline_s):
    with pytest.raises(DeadlinePassed):
        queue.readers[0].receive(time.monotonic() + deadline_s)
    while queue.writer.try_send([bytes(1000)]):
        pass
    with pytest.raises(DeadlinePassed):
        queue.writer.send([bytes(1000)], time.monotonic() + deadline_s)


def test_waits_end_with_the_peers_death():
    read_fd, write_fd = os.pipe()
    queue = Queue(deaths=(read_fd,))
    queue.writer.send([b"before"])
    queue.readers[0].check_peer()  # it takes the wake-up, and not the message
    os.close(write_fd)
    with queue.readers[0].receive() as parts:  # what it said before it died still counts
        assert bytes(parts[0]) == b"before"
    with pytest.raises(PeerDied):
        queue.readers[0].check_peer()
    with pytest.raises(PeerDied):
        queue.readers[0].receive()
    while queue.writer.try_send([bytes(1000)]):
        pass
    with pytest.raises(PeerDied):
        queue.writer.send([bytes(1000)])
    queue.close()
    os.close(read_fd)


def test_waits_end_with_the_other_sides_close():
    queue = Queue()
    outcome: list[type] = []

    def receive() -> None:
        try:
            queue.readers[0].receive()
        except RingClosed as closed:
            outcome.append(type(closed))

    thread = threading.Thread(target=receive)
    thread.start()
    queue.writer.close()
    thread.join(10)
    assert outcome == [RingClosed]
    queue.close()


def test_a_blocked_sender_goes_on_as_the_reader_takes():
    """Both ends sleep and are woken thousands of times; every tenth message goes by the side channel."""
    queue = Queue(capacity=4 * PAGE)
    received = []

    def receive() -> None:
        for _ in range(2000):
            with queue.readers[0].receive() as parts:
                received.append((int.from_bytes(parts[0], "little"), len(parts[1])))

    thread = threading.Thread(target=receive)
    thread.start()
    sizes = [3 * PAGE if i % 10 == 0 else 1500 for i in range(2000)]
    for i, size in enumerate(sizes):
        queue.writer.send([i.to_bytes(4, "little"), bytes(size)], time.monotonic() + 30)
    thread.join(30)
    assert received == list(enumerate(sizes))
    queue.close()


def test_an_inherited_end_is_made_from_names():
    parent = create_queue(CAPACITY, 2)
    reader = NearReader(QueueHandle.from_fds(parent.fds_of_reader(1)), 1)
    writer = NearWriter(QueueHandle.from_fds(parent.fds_of_writer()))
    for data in (b"x", b"y" * CAPACITY):
        assert writer.try_send([data])
        with reader.try_receive() as parts:
            assert bytes(parts[0]) == data
    writer.close()
    reader.close()
    parent.close()


def test_nothing_stays_open():
    def cycle() -> None:
        queue = Queue(num_readers=3)
        assert queue.writer.try_send([bytes(CAPACITY)])
        queue.receive(0)
        queue.close()

    cycle()
    num_fds = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        cycle()
    assert len(os.listdir("/proc/self/fd")) == num_fds
