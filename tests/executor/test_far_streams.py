"""One message to several hosts: framed once, sent in one burst, and signalled to who waits for it."""

from __future__ import annotations

import os
import time

import pytest
from queue_kinds import BOUND_S, Queue, joined, made_keys

from ringcore.executor.far import queues
from ringcore.executor.far.frames import PIECE_BYTES
from ringcore.executor.far.port import Port
from ringcore.executor.message_queue import queue_writer
from ringcore.executor.ring_memory import PAGE

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
