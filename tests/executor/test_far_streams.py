"""One message to several hosts: framed once, sent in one burst, and signalled to who waits for it."""

from __future__ import annotations

import contextlib
import os
import select
import time
from itertools import repeat

import pytest
from queue_kinds import BOUND_S, Queue, joined, made_keys

from ringcore.executor.far import queues
from ringcore.executor.far.frames import CLOSED, PART, PIECE_BYTES, pack_head
from ringcore.executor.far.port import Port
from ringcore.executor.far.queues import FarReader, FarWriter
from ringcore.executor.message_queue import layout, queue_writer
from ringcore.executor.ring_buffer import RingClosed
from ringcore.executor.ring_memory import PAGE
from ringcore.executor.waiting import Event

CAPACITY = 16 * PAGE


@pytest.fixture
def four():
    """A queue to readers on four hosts, and the port of its writer."""
    with joined(4, *made_keys()) as (listener, links, ends):
        writer = queue_writer([link.writer(0, CAPACITY) for link in links])
        yield Queue(writer, [end.link.reader(0, CAPACITY) for end in ends]), listener._port


@pytest.mark.parametrize("size", [64, CAPACITY, PIECE_BYTES + 1, 3 * PIECE_BYTES])
def test_a_message_to_all_is_framed_once(monkeypatch, four, size):
    queue, _ = four
    framed, make = [], queues._frames
    monkeypatch.setattr(queues, "_frames", lambda *arguments: framed.append(1) or make(*arguments))
    for number in range(1, 4):
        sent = [os.urandom(size), b"", bytes([number])]
        queue.writer.send(sent, time.monotonic() + BOUND_S)
        assert [queue.receive(index) for index in range(4)] == [sent] * 4
        assert len(framed) == number


def test_a_stream_that_stands_elsewhere_has_frames_of_its_own(four):
    """One of the readers was sent a message of its own before."""
    queue, _ = four
    last = queue.writer._others[-1]
    last.send([b"alone"])
    for _ in range(3):
        queue.writer.send([b"all"])
    assert queue.receive(3) == [b"alone"]
    for _ in range(3):
        assert [queue.receive(index) for index in range(4)] == [[b"all"]] * 4


def test_a_burst_ends_with_a_look_at_what_arrived(monkeypatch, four):
    """Each send may take the signal of a message that arrived meanwhile, and in a burst none looks."""
    queue, port = four
    taken, take = [], port._take
    monkeypatch.setattr(port, "_take", lambda frames: taken.append(frames) or take(frames))
    queue.readers[0].close()  # which tells the writer
    assert port.socket.poll(BOUND_S * 1e3)
    with port.burst():
        queue.writer._others[0].send([b"1"])
        port.pump()
        assert not taken
    assert len(taken) == 1


def test_an_error_in_a_burst_leaves_the_port_as_it_was(four):
    queue, port = four
    with pytest.raises(ZeroDivisionError), port.burst():
        raise ZeroDivisionError
    queue.writer.send([b"after"])
    assert [queue.receive(index) for index in range(4)] == [[b"after"]] * 4


def test_a_message_to_all_pumps_as_often_for_four_as_for_two(monkeypatch, four):
    queue, port = four
    looks, look = [], Port.take_events
    monkeypatch.setattr(Port, "take_events", lambda one: looks.append(one) or look(one))
    queue.writer.send([b"all"])
    assert looks.count(port) == 2  # after the first reader's, and after the others'


class Elsewhere:
    """A connection whose other end is this test."""

    pump, burst, sources = staticmethod(lambda: None), contextlib.nullcontext, ()

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.transmit = self.sent.append


def is_signalled(reader) -> bool:
    return bool(select.select(reader.events, [], [], 0)[0])


@pytest.fixture
def reader():
    reader = FarReader(Elsewhere(), 0, CAPACITY, [], 0.0)
    yield reader
    reader.free()


def frames():
    """Each message of a writer, as its reader takes it."""
    link = Elsewhere()
    writer = FarWriter(link, 0, CAPACITY, [], 0.0)
    for _ in repeat(None, 8):
        assert writer.try_send([b"a message"])
        yield memoryview(link.sent[-1])
    writer.free()


def arrive(reader, frame) -> None:
    _, size = layout([b"a message"])
    reader.take(PART, reader._window.received, size, frame)


def test_a_wait_after_the_last_message_sleeps(reader):
    for frame in frames():
        arrive(reader, frame)
        assert is_signalled(reader)
        with reader.try_receive():
            assert not is_signalled(reader)
        assert reader.try_receive() is None


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("what", ["a message", "the end"])
def test_what_comes_while_the_last_message_is_taken_stays_signalled(monkeypatch, reader, what, moment):
    """Another thread takes it from the connection just before the event is drained, or just after."""
    first, second, *_ = frames()
    drain = Event.drain

    def drained(event) -> None:
        drain(event) if moment == "after" else None
        if what == "a message":
            arrive(reader, second)
        else:
            reader.take(CLOSED, reader._window.received, 0, memoryview(pack_head(CLOSED, 0)))
        drain(event) if moment == "before" else None

    arrive(reader, first)
    with monkeypatch.context() as patch:
        patch.setattr(Event, "drain", drained)
        with reader.try_receive() as parts:
            assert bytes(parts[0]) == b"a message"
    assert is_signalled(reader)
    if what == "a message":
        with reader.try_receive() as parts:
            assert bytes(parts[0]) == b"a message"
    else:
        with pytest.raises(RingClosed):
            reader.try_receive()
