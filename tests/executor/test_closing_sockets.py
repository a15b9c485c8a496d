"""ZeroMQ's sockets and contexts are freed once, after their last use: else libzmq aborts the process, sometimes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import zmq
from queue_kinds import BOUND_S, made_keys

from ringcore.config.admin_keys import create_keys, read_client_keys
from ringcore.engine_core.admin.curve_listener import CurveListener
from ringcore.engine_core.transport.framing import FrameLimits
from ringcore.executor import waiting
from ringcore.executor.far.ends import HostListener, JoiningEnd
from ringcore.executor.far.frames import Join
from ringcore.executor.ring_buffer import RingClosed
from ringcore.executor.ring_memory import PAGE
from ringcore.executor.side_channel import STUB
from ringcore.executor.zmq_channel import ZmqChannel
from ringcore.front_end.curve_connection import CurveConnection

SIZE = 8 * PAGE


@pytest.fixture
def channel():
    made = ZmqChannel.create(1)
    yield made
    made.close()


@pytest.fixture
def destroyed(monkeypatch):
    """Each context that is destroyed, with the thread that does it."""
    found, destroy = [], zmq.Context.destroy

    def noting(context, linger=None):
        found.append((context, threading.current_thread()))
        destroy(context, linger)

    monkeypatch.setattr(zmq.Context, "destroy", noting)
    return found


def at_each_poll(monkeypatch, action) -> None:
    """Calls `action` as a poll of ZeroMQ begins."""
    poll = zmq.Poller.poll

    def polling(poller, timeout=None):
        action()
        return poll(poller, timeout)

    monkeypatch.setattr(zmq.Poller, "poll", polling)


def test_a_receiver_that_another_thread_closes_is_freed_by_the_one_that_waits(channel, destroyed, monkeypatch):
    receiver, waits, outcome = channel.receiver(0, []), threading.Event(), []
    at_each_poll(monkeypatch, waits.set)

    def receive() -> None:
        try:
            receiver.receive(STUB.pack(1, SIZE))
        except RingClosed:
            outcome.append(len(destroyed))

    thread = threading.Thread(target=receive)
    thread.start()
    assert waits.wait(BOUND_S)
    receiver.close()
    thread.join()
    assert [by for _, by in destroyed] == [thread]
    assert outcome == [1]
    receiver.close()
    with pytest.raises(RingClosed):
        receiver.receive(STUB.pack(1, SIZE))
    assert len(destroyed) == 1


def test_a_signal_handler_may_close_the_receiver_below_it(channel, destroyed, monkeypatch):
    receiver, num_destroyed = channel.receiver(0, []), []

    def handle() -> None:
        receiver.close()
        num_destroyed.append(len(destroyed))

    at_each_poll(monkeypatch, handle)
    with pytest.raises(RingClosed):
        receiver.receive(STUB.pack(1, SIZE))
    assert (num_destroyed, len(destroyed)) == ([0], 1)


def test_a_signal_handler_may_close_the_sender_below_it(channel, destroyed, monkeypatch):
    sender, receiver, num_destroyed = channel.sender([0]), channel.receiver(0, []), []
    deadline = time.monotonic() + BOUND_S
    while not sender.has_room():
        assert time.monotonic() < deadline

    def handle() -> None:
        sender.close()
        num_destroyed.append(len(destroyed))

    with monkeypatch.context() as patch:
        at_each_poll(patch, handle)
        assert sender.try_send([bytes(SIZE)], SIZE) is not None  # it was open when it looked for room
    assert (num_destroyed, len(destroyed)) == ([0], 1)
    with pytest.raises(RingClosed):
        sender.try_send([bytes(SIZE)], SIZE)
    receiver.close()


def test_the_ends_of_a_connection_terminate_their_context_once(monkeypatch, tmp_path):
    """Two threads close at once: a second termination beside the first would abort the process, or never end."""
    server_keys, client_keys = made_keys()
    listener = HostListener("tcp://127.0.0.1:*", server_keys, lambda join: None)
    joining = JoiningEnd(listener.address, client_keys)
    admin = CurveListener("tcp://127.0.0.1:*", str(create_keys(tmp_path / "keys")), FrameLimits())
    terms, terminates, may_go_on = [], threading.Event(), threading.Event()
    term = zmq.Context.term

    def slow_term(context) -> None:
        terms.append(context)
        terminates.set()
        assert may_go_on.wait(BOUND_S)
        term(context)

    monkeypatch.setattr(zmq.Context, "term", slow_term)
    for number, end in enumerate((joining, listener, admin)):
        first = threading.Thread(target=end.close)
        first.start()
        assert terminates.wait(BOUND_S)
        end.close()
        may_go_on.set()
        first.join()
        assert len(terms) == number + 1
        assert terms[-1].closed
        terminates.clear()
        may_go_on.clear()


@pytest.mark.parametrize("use", ["send", "recv"])
def test_a_signal_handler_may_close_the_port_below_it(use, monkeypatch):
    server_keys, client_keys = made_keys()
    listener = HostListener("tcp://127.0.0.1:*", server_keys, lambda join: None)
    joining = JoiningEnd(listener.address, client_keys)
    joining.link.note(Join("a", "0"))
    link = listener.wait_for(["a"], time.monotonic() + BOUND_S)["a"]
    joining.link.note(Join("a", "0"))
    link.on_note = lambda note: None
    deadline, real = time.monotonic() + BOUND_S, getattr(zmq.Socket, use)

    def closing(socket, *arguments, **options):
        done = real(socket, *arguments, **options)
        listener.close()
        return done

    with monkeypatch.context() as patch:
        patch.setattr(zmq.Socket, use, closing)  # each message has two frames
        while not listener._port.is_closed:
            listener._port.pump() if use == "recv" else link.transmit(b"frame")
            assert time.monotonic() < deadline
    link.close()
    joining.close()


_PEER_CLOSES_DURING_A_CLOSE = """
import threading, time
from queue_kinds import joined, made_keys
from ringcore.executor.far.frames import AskStacks

with joined(1, *made_keys()) as (listener, [link], [end]):
    link.on_note = lambda note: None
    closes = threading.Event()

    def send_until_the_other_side_closes():
        while not closes.wait(0.0005):
            end.link.note(AskStacks(0))
        time.sleep(0.02)
        end.close()

    thread = threading.Thread(target=send_until_the_other_side_closes)
    thread.start()
    for _ in range(64):
        link.transmit(bytes(1 << 20))  # libzmq cannot have sent all of it when it is to close
    closes.set()
    listener.close()
    thread.join()
"""


def test_a_peer_that_closes_during_a_close():
    """libzmq would write heartbeats to the closed connection of a socket that lingers, and abort the process."""
    command = [sys.executable, "-c", _PEER_CLOSES_DURING_A_CLOSE]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_no_end_of_an_admin_connection_has_heartbeats(tmp_path):
    """Else a client that sends more than is read, and is killed, would take the process of the engine with it."""
    keys = create_keys(tmp_path / "keys")
    admin = CurveListener("tcp://127.0.0.1:*", str(keys), FrameLimits())
    client = CurveConnection(admin.address, read_client_keys(keys))
    for socket in (admin._socket, client._socket):
        assert socket.getsockopt(zmq.HEARTBEAT_IVL) == 0
        assert socket.getsockopt(zmq.TCP_KEEPALIVE) == 1
    client.close()
    admin.close()


def test_an_interrupt_after_the_close_touches_no_descriptor(monkeypatch):
    """Its number may be that of ZeroMQ's own eventfd by then: one signal too many, and libzmq aborts the process."""
    signalled: list[int] = []
    listener = HostListener("tcp://127.0.0.1:*", made_keys()[0], lambda join: None)
    monkeypatch.setattr(waiting, "signal_event", signalled.append)
    listener.interrupt()
    assert signalled == [listener.closing_fd]
    listener.close()
    signalled.clear()
    listener.interrupt()
    assert not signalled


def test_a_host_that_joined_and_left_leaves_no_descriptor():
    server_keys, client_keys = made_keys()
    num_fds = len(os.listdir("/proc/self/fd"))
    listener = HostListener("tcp://127.0.0.1:*", server_keys, lambda join: None)
    joining = JoiningEnd(listener.address, client_keys)
    joining.link.note(Join("a", "0"))
    deadline = time.monotonic() + BOUND_S
    for is_joined in (True, False):
        while listener.is_waiting("a") != is_joined:
            listener._port.pump()
            assert time.monotonic() < deadline
        joining.close()
    listener.close()
    assert len(os.listdir("/proc/self/fd")) == num_fds
