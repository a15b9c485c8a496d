"""What a message queue promises to near readers, far ones, and both at once."""

from __future__ import annotations

import gc
import os
import random
import threading
import time

import numpy as np
import pytest
from queue_kinds import BOUND_S, joined, made_keys, queue_of

from ringcore.errors import InvalidRequestError
from ringcore.executor import message_queue, ring_memory
from ringcore.executor.ring_buffer import RingClosed
from ringcore.executor.ring_memory import PAGE
from ringcore.executor.waiting import DeadlinePassed, PeerDied

KINDS = ["memfd", "named", "zmq", "far", "mixed"]  # named: files that lose their name, where there is no memfd
CAPACITY = 16 * PAGE


@pytest.fixture(params=KINDS)
def kind(request, monkeypatch):
    if request.param == "named":
        monkeypatch.setattr(ring_memory, "HAS_MEMFD", False)
    return request.param


@pytest.fixture
def queue(kind):
    with queue_of(kind, CAPACITY) as queue:
        yield queue


SIZES = [0, 1, 63, 64, 65, CAPACITY // 2 - 128, CAPACITY // 2, CAPACITY // 2 + 1, 2 * CAPACITY, 3 << 20]


def test_a_message_of_any_size(queue):
    for size in SIZES:
        for _ in range(2):
            sent = [os.urandom(16), os.urandom(size), b""]
            queue.writer.send(sent, time.monotonic() + BOUND_S)
            assert queue.receive(0) == sent
            assert queue.receive(1) == sent
            assert queue.receive_at_once(0) is None


def test_messages_of_all_sizes_keep_their_order(queue):
    """Each once, whole, however the readers' turns fall."""
    rng = random.Random(3)
    received: list[list[list[bytes]]] = [[], []]
    sent: list[list[bytes]] = []
    parts: list[bytes] = []
    num_large = 0
    while len(sent) < 400:
        if queue.writer.try_send(parts):
            sent.append(parts)
            num_large += sum(map(len, parts)) > CAPACITY // 2
            parts = [rng.randbytes(rng.choice([0, 1, 64, 65, 5000, CAPACITY])) for _ in range(rng.randint(0, 4))]
            continue
        for index in (0, 1):
            for _ in range(rng.randint(1, 5)):
                if (message := queue.receive_at_once(index)) is not None:
                    received[index].append(message)
    for index in (0, 1):
        received[index] += [queue.receive(index) for _ in range(len(sent) - len(received[index]))]
        assert queue.receive_at_once(index) is None
    assert received == [sent, sent]
    assert num_large > 50


@pytest.mark.parametrize("size", [100, 4 * CAPACITY])
def test_what_was_received_never_changes(queue, size):
    sent = [os.urandom(size) for _ in range(3)]
    kept = []
    for data in sent:
        queue.writer.send([data], time.monotonic() + BOUND_S)
        kept.append(queue.receive(0)[0])
        queue.receive(1)
    for _ in range(40):
        queue.writer.send([b"\xff" * 20000], time.monotonic() + BOUND_S)
        queue.receive(0)
        queue.receive(1)
    assert kept == sent


def test_parts_are_read_only_and_end_with_the_lease(queue):
    for size in (5, CAPACITY):
        queue.writer.send([b"a" * 3, memoryview(np.arange(float(size))).cast("B")])
        queue.receive(1)
        with queue.readers[0].receive(time.monotonic() + BOUND_S) as parts:
            view = parts[1]
            assert np.frombuffer(view, dtype=np.float64).tolist() == list(range(size))
            assert view.readonly
        with pytest.raises(ValueError, match="released"):
            view[0]


def test_the_sender_may_reuse_its_buffers(queue):
    for size in (10, 2 * CAPACITY, 3 << 20):
        buffer = bytearray(b"a" * size)
        queue.writer.send([buffer], time.monotonic() + BOUND_S)
        buffer[:] = b"b" * size
        assert queue.receive(0) == queue.receive(1) == [b"a" * size]


def test_a_slow_reader_slows_the_writer(queue):
    """Whatever it has not released is bounded, and the writer goes on as soon as it takes."""
    num_sent = queue.fill(1000)
    assert 1 <= num_sent * 1000 <= CAPACITY
    assert queue.writer.unread_bytes() >= num_sent * 1000
    for _ in range(num_sent):
        queue.receive(0)
    assert not queue.writer.try_send([bytes(1000)])  # the other one has taken nothing
    for _ in range(num_sent):
        assert queue.receive(1) == [bytes(1000)]
    queue.writer.send([bytes(1000)], time.monotonic() + BOUND_S)


def test_large_messages_under_way_are_bounded(queue):
    num_sent = queue.fill(CAPACITY)
    assert 1 <= num_sent <= 8
    for _ in range(num_sent):
        assert queue.receive(0) == [bytes(CAPACITY)]
    assert not queue.writer.try_send([bytes(CAPACITY)])  # the other reader has not taken them
    for _ in range(num_sent):
        assert queue.receive(1) == [bytes(CAPACITY)]
    queue.writer.send([bytes(CAPACITY)], time.monotonic() + BOUND_S)


def test_a_message_is_sent_to_all_or_to_none(queue):
    """A refusal because of one reader leaves nothing with the other."""
    num_sent = 0
    deadline = time.monotonic() + BOUND_S
    while (num_new := queue.fill(2000)) and time.monotonic() < deadline:  # until reader 0 alone is in the way
        num_sent += num_new
        for _ in range(num_new):
            queue.receive(1)
    assert queue.receive_at_once(1) is None
    for _ in range(3):
        assert not queue.writer.try_send([b"x" * 2000])
    time.sleep(0.05)
    assert queue.receive_at_once(1) is None
    for _ in range(num_sent):
        assert queue.receive(0) == [bytes(2000)]
    queue.writer.send([b"x" * 2000], time.monotonic() + BOUND_S)
    assert queue.receive(0) == queue.receive(1) == [b"x" * 2000]


def test_an_interrupted_reader_gives_the_memory_back(queue):
    for _ in range(20):
        queue.writer.send([bytes(20000)], time.monotonic() + BOUND_S)
        queue.receive(1)
        with pytest.raises(ZeroDivisionError), queue.readers[0].receive(time.monotonic() + BOUND_S):
            raise ZeroDivisionError


def test_a_message_that_is_too_large(queue, monkeypatch):
    monkeypatch.setattr(message_queue, "MAX_MESSAGE_BYTES", 2 * CAPACITY)
    with pytest.raises(InvalidRequestError, match="in pieces") as caught:
        queue.writer.try_send([bytes(2 * CAPACITY)])
    assert caught.value.details["value"] > 2 * CAPACITY
    queue.writer.send([b"next"])
    assert queue.receive(0) == queue.receive(1) == [b"next"]


def test_waits_end_at_the_deadline(queue):
    for deadline_s in (0.0, 0.02):
        with pytest.raises(DeadlinePassed):
            queue.readers[0].receive(time.monotonic() + deadline_s)
    queue.fill(1000)
    for deadline_s in (0.0, 0.02):
        with pytest.raises(DeadlinePassed):
            queue.writer.send([bytes(1000)], time.monotonic() + deadline_s)


def test_waits_end_with_the_peers_death(kind):
    read_fd, write_fd = os.pipe()
    with queue_of(kind, CAPACITY, (read_fd,)) as queue:
        queue.writer.send([b"before"])
        for index in (0, 1):
            wait_for_message(queue.readers[index])
            queue.readers[index].check_peer()  # it takes the wake-up, and not the message
        os.close(write_fd)
        for index in (0, 1):
            with queue.readers[index].receive() as parts:  # what it said before it died still counts
                assert bytes(parts[0]) == b"before"
            with pytest.raises(PeerDied):
                queue.readers[index].check_peer()
            with pytest.raises(PeerDied):
                queue.readers[index].receive()
        queue.fill(1000)
        with pytest.raises(PeerDied):
            queue.writer.send([bytes(1000)])
    os.close(read_fd)


def wait_for_message(reader) -> None:
    deadline = time.monotonic() + BOUND_S
    while not reader.has_message():
        assert time.monotonic() < deadline


def test_a_closed_queue_is_read_to_its_end(queue):
    outcome: list[object] = []

    def receive() -> None:
        try:
            while True:
                outcome.append(queue.receive(0))
        except RingClosed as closed:
            outcome.append(type(closed))

    thread = threading.Thread(target=receive)
    thread.start()
    queue.writer.send([b"last"])
    queue.writer.close()
    thread.join()  # its own waits are bounded; the queue is not to be freed under it
    assert outcome == [[b"last"], RingClosed]
    assert queue.receive(1) == [b"last"]
    with pytest.raises(RingClosed):
        queue.receive(1)
    with pytest.raises(RingClosed):
        queue.writer.try_send([b"x"])


def test_a_writer_without_room_ends_with_a_reader_that_leaves(queue):
    queue.fill(1000)
    queue.readers[1].close()
    with pytest.raises(RingClosed):
        queue.writer.send([bytes(1000)], time.monotonic() + BOUND_S)


def test_a_blocked_sender_goes_on_as_the_readers_take(queue):
    """Both ends sleep and are woken hundreds of times; every tenth message is a large one."""
    received: list[list[tuple[int, int]]] = [[], []]

    def receive(index: int) -> None:
        for _ in range(400):
            number, rest = queue.receive(index)
            received[index].append((int.from_bytes(number, "little"), len(rest)))

    threads = [threading.Thread(target=receive, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    sizes = [CAPACITY if i % 10 == 0 else 1500 for i in range(400)]
    for i, size in enumerate(sizes):
        queue.writer.send([i.to_bytes(4, "little"), bytes(size)], time.monotonic() + BOUND_S)
    for thread in threads:
        thread.join()
    assert received == [list(enumerate(sizes))] * 2


@pytest.mark.parametrize("end", ["engine", "host"])
def test_the_end_of_a_process_is_the_end_of_its_connection(end):
    """Within milliseconds, and of no other host's."""
    with joined(2, *made_keys()) as (listener, links, ends):
        writers = [link.writer(0, CAPACITY) for link in links]
        readers = [one.link.reader(0, CAPACITY) for one in ends]
        for writer in writers:
            writer.send([b"before"])
        began = time.monotonic()
        if end == "host":
            ends[0].close()
            with pytest.raises(PeerDied):
                links[0].reader(1, CAPACITY).receive(began + BOUND_S)
            assert "ended" in links[0].why
            assert links[1].why is None
            writers[1].send([b"after"])
            assert [bytes(readers[1].receive(began + BOUND_S).parts[0]) for _ in range(1)] == [b"before"]
        else:
            listener.close()
            for reader in readers:
                with reader.receive(began + BOUND_S) as parts:
                    assert bytes(parts[0]) == b"before"
                with pytest.raises(PeerDied):
                    reader.receive(began + BOUND_S)
        assert time.monotonic() - began < 0.5 * BOUND_S


def test_nothing_stays_open(kind):
    def cycle() -> None:
        with queue_of(kind, CAPACITY) as queue:
            queue.writer.send([bytes(CAPACITY)], time.monotonic() + BOUND_S)
            queue.receive(0)

    cycle()
    gc.collect()  # errors of earlier tests hold waiters
    num_fds = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        cycle()
    assert len(os.listdir("/proc/self/fd")) == num_fds
