"""What else comes to the port of the hosts: wrong keys, no keys, garbage; and from a known key what is no frame."""

from __future__ import annotations

import os
import random
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import zmq
from queue_kinds import BOUND_S, joined, made_keys

from ringcore.executor.far.agent import _Session
from ringcore.executor.far.ends import HostListener, JoiningEnd
from ringcore.executor.far.frames import (
    CLOSED,
    HEAD_BYTES,
    LEFT,
    NOTE,
    PART,
    RELEASED,
    Finish,
    Join,
    pack_head,
    pack_note,
)
from ringcore.executor.far.port import Port
from ringcore.executor.ring_memory import PAGE
from ringcore.executor.waiting import PeerDied

CAPACITY = 4 * PAGE


@pytest.fixture
def host():
    """The engine's end and one host's, with a stream each way; and the keys."""
    keys = made_keys()
    with joined(1, *keys) as (listener, links, ends):
        calls, replies = links[0].writer(0, CAPACITY), links[0].reader(0, CAPACITY)
        ends[0].link.reader(0, CAPACITY)
        ends[0].link.writer(0, CAPACITY)
        yield listener, links[0], ends[0], calls, replies, keys[1]


def is_whole(host) -> bool:
    """Whether a message still goes to the host and back."""
    _, link, end, calls, replies, _ = host
    there, back = end.link._readers[0], end.link._writers[0]
    calls.send([b"there"], time.monotonic() + BOUND_S)
    with there.receive(time.monotonic() + BOUND_S) as parts:
        back.send([bytes(parts[0]), b"back"], time.monotonic() + BOUND_S)
    with replies.receive(time.monotonic() + BOUND_S) as parts:
        return [bytes(part) for part in parts] == [b"there", b"back"] and link.why is None


def test_garbage_and_strangers_change_nothing(host):
    listener = host[0]
    port = int(listener.address.rpartition(":")[2])
    rng = random.Random(1)
    sockets = []
    for size in (0, 1, 10, 64, 1000, 100_000):
        one = socket.create_connection(("127.0.0.1", port))
        one.sendall(rng.randbytes(size))
        sockets.append(one)
    context = zmq.Context()
    for is_curve in (False, True):
        stranger = context.socket(zmq.DEALER)
        stranger.linger = 0
        if is_curve:
            public, stranger.curve_secretkey = zmq.curve_keypair()
            stranger.curve_publickey, stranger.curve_serverkey = public, host[5].server
        stranger.connect(listener.address)
        stranger.send(pack_note(Join("host 0", "0")))
        sockets.append(stranger)
    deadline = time.monotonic() + BOUND_S
    while listener._zap_handler.num_rejected == 0:
        assert is_whole(host)
        assert time.monotonic() < deadline
    assert is_whole(host)
    assert set(listener.joined) == {"host 0"}
    assert listener.joined["host 0"].note.version == "0"
    for one in sockets:
        one.close()
    context.term()


GARBAGE = {
    "nothing": b"",
    "too short": bytes(HEAD_BYTES - 1),
    "another protocol": b"\x01\x63" + bytes(HEAD_BYTES - 2),
    "another kind": pack_head(77, 0),
    "another stream": pack_head(PART, 9, 0, 4) + bytes(4),
    "a later message": pack_head(PART, 0, 640, 4) + bytes(4),
    "a piece larger than its message": pack_head(PART, 0, 0, 4) + bytes(5),
    "a message larger than any": pack_head(PART, 0, 0, 1 << 40) + bytes(8),
    "an end before the end": pack_head(CLOSED, 0, 64),
    "a release of nothing": pack_head(RELEASED, 0, 1 << 20),
    "a leave of no stream": pack_head(LEFT, 5),
    "no note": pack_head(NOTE, 0) + b"\xc1",
    "a note of another type": pack_head(NOTE, 0) + b"\x81\xa4type\xa4Evil",
    "a join again": pack_note(Join("host 0", "0")),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_a_known_host_that_sends_what_cannot_be_loses_its_own_connection(name, host):
    listener, link, end, _, replies, keys = host
    link.on_note = refuse
    other = JoiningEnd(listener.address, keys)
    try:
        other.link.note(Join("other", "0"))
        other_link = listener.wait_for(["other"], time.monotonic() + BOUND_S)["other"]
        end.link.transmit(GARBAGE[name])
        with pytest.raises(PeerDied):
            replies.receive(time.monotonic() + BOUND_S)
        assert "it sent what cannot be" in link.why
        reader = other.link.reader(0, CAPACITY)
        other_link.writer(0, CAPACITY).send([b"fine"])
        with reader.receive(time.monotonic() + BOUND_S) as parts:
            assert bytes(parts[0]) == b"fine"
    finally:
        other.close()


def refuse(note):
    from ringcore.executor.ring_memory import RingCorruptError

    raise RingCorruptError(f"{note} is none of a host's")


def test_a_sender_without_room_is_cut_off(host):
    """The window bounds what a host can make the engine keep."""
    _, link, end, _, replies, _ = host
    position, size = 0, 2000
    for _ in range(20):
        body = os.urandom(size)
        end.link.transmit(pack_head(PART, 0, position, size) + body)
        position += size + 64
    deadline = time.monotonic() + BOUND_S
    while link.why is None:
        link.pump()
        assert time.monotonic() < deadline
    assert "were released" in link.why
    assert replies._window.received <= CAPACITY


def test_frames_before_a_host_has_joined_are_dropped(host):
    listener, _, _, _, _, keys = host
    early = JoiningEnd(listener.address, keys)
    early.link.note(Finish())
    early.link.transmit(b"x")
    deadline = time.monotonic() + BOUND_S
    while listener._strange.num < 2:
        assert is_whole(host)
        assert time.monotonic() < deadline
    early.close()


def test_an_answer_that_arrives_while_the_host_joins_is_taken(monkeypatch):
    """A busy machine may stop the thread of a host between the `Join` that it sends and what it sets next."""
    server_keys, client_keys = made_keys()
    listener = HostListener("tcp://127.0.0.1:*", server_keys, lambda join: None)
    pump, joins = Port.pump, iter([True])

    def late_pump(port):
        if port.socket.type == zmq.DEALER and next(joins, False):
            port.socket.poll(BOUND_S * 1e3)
        pump(port)

    monkeypatch.setattr(Port, "pump", late_pump)
    with ThreadPoolExecutor(1) as engine:
        links = engine.submit(listener.wait_for, ["a"], time.monotonic() + BOUND_S)
        links.add_done_callback(lambda done: done.result()["a"].note(Finish()))
        session = _Session(JoiningEnd(listener.address, client_keys), Join("a", "0"))
    try:
        assert session._is_finished
    finally:
        session.close()
        listener.close()
