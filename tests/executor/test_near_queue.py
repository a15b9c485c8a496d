"""Near readers: pages, descriptors and stubs. What they promise as all others do is in `test_queue_conformance.py`."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time

import numpy as np
import pytest
from queue_kinds import queue_of

from ringcore.errors import CapacityError
from ringcore.executor import near_queue, ring_memory, side_channel
from ringcore.executor.near_queue import NearReader, NearWriter, QueueHandle, create_queue
from ringcore.executor.ring_memory import PAGE, RingCorruptError

CAPACITY = 16 * PAGE


@pytest.fixture(params=["memfd", "named"], autouse=True)
def memory(request, monkeypatch):
    """Every test with the kernel's unnamed memory, and with files that lose their name, where there is none."""
    if request.param == "named":
        monkeypatch.setattr(ring_memory, "HAS_MEMFD", False)
    return request.param


@pytest.fixture
def queue():
    with queue_of("memfd", CAPACITY) as queue:
        yield queue


def test_parts_are_aligned(queue):
    assert queue.writer.try_send([b"a" * 3, bytes(40), bytearray(b"c")])
    with queue.readers[0].try_receive() as parts:
        assert [np.frombuffer(part, np.uint8).ctypes.data % 64 for part in parts] == [0, 0, 0]


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
    """The kernel holds pages of the first so many files for longer than the writer waits."""
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


def test_pages_that_cannot_be_sealed_are_left_for_new_ones(queue, monkeypatch):
    held = refuse_to_seal(monkeypatch, 2)
    num_fds = len(os.listdir("/proc/self/fd"))
    data = os.urandom(4 * CAPACITY)
    assert queue.writer.try_send([data])
    assert queue.receive(0) == [data]
    assert len(held) == 2
    assert len(os.listdir("/proc/self/fd")) == num_fds


def test_a_kernel_that_seals_nothing_is_told(queue, monkeypatch):
    refuse_to_seal(monkeypatch, 1000)
    num_fds = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CapacityError, match="busy"):
        queue.writer.try_send([bytes(4 * CAPACITY)])
    assert len(os.listdir("/proc/self/fd")) == num_fds


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


def test_zeromq_sends_to_no_other_user(monkeypatch):
    """The names of the sockets can be seen by all; a sender of another user lets this one connect to no purpose."""
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with queue_of("zmq", CAPACITY) as queue:
        deadline = time.monotonic() + 0.2
        while time.monotonic() < deadline:
            assert not queue.writer.try_send([bytes(4 * CAPACITY)])
        assert queue.writer.try_send([b"small"])  # by the ring, as ever
