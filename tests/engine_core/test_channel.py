"""The connection between client and engine: in order, bounded, never stuck, never silent about its end."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time

import numpy as np
import pytest

from ringcore.engine_core.transport import channel as channel_module
from ringcore.engine_core.transport.channel import ClientChannel, EngineChannel, FrameLimits, StreamClosed, channel_pair
from ringcore.engine_core.transport.framing import encode_frame
from ringcore.errors import EngineDeadError, InvalidRequestError
from ringcore.protocol.codec import encoder
from ringcore.protocol.messages import AbortRequests, AddRequests, EngineDead, RpcCall, RpcResult, Shutdown
from ringcore.protocol.requests import WireError

WAIT_S = 90.0
LIMITS = FrameLimits(message_bytes=1000, buffer_bytes=10_000, num_buffers=2)


class Ends:
    """A channel of both ends in this process, and the two descriptors that a client's `send` watches."""

    def __init__(self, limits=None, engine_limits=None) -> None:
        ours, theirs = channel_pair()
        self.raw_client, self.raw_engine = ours, theirs
        self.engine_end, self.closing = os.eventfd(0), os.eventfd(0)
        self.client = ClientChannel(ours, self.engine_end, self.closing, limits)
        self.engine = EngineChannel(os.dup(theirs.fileno()), engine_limits or limits)
        theirs.close()

    def close(self) -> None:
        self.client.close()
        self.engine.close()
        os.close(self.engine_end)
        os.close(self.closing)


@pytest.fixture
def make_ends():
    made = []

    def make(*args):
        made.append(Ends(*args))
        return made[-1]

    yield make
    for ends in made:
        ends.close()


@pytest.fixture
def ends(make_ends):
    return make_ends()


def is_readable(channel, timeout_s):
    return bool(select.select([channel], [], [], timeout_s)[0])


def receive(channel):
    while (received := channel.receive()) is None:
        assert is_readable(channel, WAIT_S), "no message came"
    return received


def receive_while_flushing(engine, client, num):
    """The client's next messages, the engine's backlog being written meanwhile as its loop does."""
    got = []
    deadline = time.monotonic() + WAIT_S
    while len(got) < num:
        assert time.monotonic() < deadline
        engine.flush()
        while (received := client.receive()) is not None:
            got.append(received)
    return got


def in_thread(function, *args):
    """Starts it; the list gets what it raised, or None."""
    outcome: list = []

    def run():
        try:
            function(*args)
        except BaseException as error:
            outcome.append(error)
        else:
            outcome.append(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, outcome


def fill(ends):
    """Sends until the engine's socket is full and a message is cut off in its middle."""
    with pytest.raises(TimeoutError):
        ends.client.send(RpcCall(0, "workers", "big"), [bytes(20 << 20)], deadline=time.monotonic() + 0.05)


# ---------------------------------------------------------------------------------------------------------------
# Messages.


def test_messages_both_ways_in_order(ends):
    for i in range(50):
        ends.client.send(AbortRequests([str(i)]))
    assert [receive(ends.engine).message.request_ids for _ in range(50)] == [[str(i)] for i in range(50)]
    for i in range(50):
        ends.engine.send(RpcResult(i))
    assert [receive(ends.client).message.call_id for _ in range(50)] == list(range(50))
    assert ends.engine.receive() is None
    assert ends.client.receive() is None


def test_buffers_travel_beside_their_message(ends):
    array = np.arange(100_000, dtype=np.int64)
    parts = [b"body", memoryview(array).cast("B"), b""]
    ends.client.send(RpcCall(1, "workers", "m"), parts)
    message, buffers = receive(ends.engine)
    assert message == RpcCall(1, "workers", "m")
    assert [bytes(b) for b in buffers] == [bytes(p) for p in parts]
    ends.engine.send(RpcResult(1, [3]), buffers)
    ((message, buffers),) = receive_while_flushing(ends.engine, ends.client, 1)
    assert message == RpcResult(1, [3])
    assert [bytes(b) for b in buffers] == [bytes(p) for p in parts]


def test_a_sender_may_reuse_its_buffer_at_once(ends):
    buffer = bytearray(b"1" * 50_000)
    ends.client.send(RpcCall(1, "workers", "m"), [buffer])
    buffer[:] = b"2" * 50_000
    assert receive(ends.engine).buffers == [b"1" * 50_000]


def test_large_buffers_both_ways(ends):
    payload = os.urandom(8 << 20)
    sending, outcome = in_thread(ends.client.send, RpcCall(1, "workers", "m"), [payload, payload[:100]])
    assert receive(ends.engine).buffers == [payload, payload[:100]]
    sending.join(WAIT_S)
    assert outcome == [None]
    ends.engine.send(RpcResult(1, [2]), [payload, payload[:100]])  # returns though nobody reads
    assert ends.engine.has_backlog
    assert receive_while_flushing(ends.engine, ends.client, 1)[0].buffers == [payload, payload[:100]]
    assert not ends.engine.has_backlog


def test_the_engine_never_waits_for_its_client(ends):
    for i in range(2000):
        ends.engine.send(RpcResult(i, [1]), [bytes([i % 256]) * 1000])
    assert ends.engine.has_backlog
    ends.client.send(AbortRequests(["a"]))  # and goes on reading
    assert receive(ends.engine).message.request_ids == ["a"]
    got = receive_while_flushing(ends.engine, ends.client, 2000)
    assert [(r.message.call_id, r.buffers) for r in got] == [(i, [bytes([i % 256]) * 1000]) for i in range(2000)]


def test_both_sides_sending_large_messages_do_not_wait_for_each_other(ends):
    payload = bytes(6 << 20)
    for i in range(3):
        ends.engine.send(RpcResult(i, [1]), [payload])
    sending, outcome = in_thread(lambda: [ends.client.send(RpcCall(i, "workers", "m"), [payload]) for i in range(3)])
    assert [len(receive(ends.engine).buffers[0]) for _ in range(3)] == [len(payload)] * 3
    sending.join(WAIT_S)
    assert outcome == [None]
    assert len(receive_while_flushing(ends.engine, ends.client, 3)) == 3


def test_two_threads_sending_keep_their_messages_whole(ends):
    def send_many(name):
        for i in range(200):
            ends.client.send(RpcCall(i, "workers", name), [name.encode() * (i * 997 % 40_000)])

    threads = [in_thread(send_many, name) for name in ("a", "b")]
    seen = {"a": 0, "b": 0}
    for _ in range(400):
        call, buffers = receive(ends.engine)
        assert call.call_id == seen[call.method]
        assert buffers == [call.method.encode() * (call.call_id * 997 % 40_000)]
        seen[call.method] += 1
    for thread, outcome in threads:
        thread.join(WAIT_S)
        assert outcome == [None]


def test_nothing_has_a_name_and_nothing_is_inherited(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    pair = channel_pair()
    try:
        assert [end.getsockname() for end in pair] == ["", ""]
        assert not any(end.get_inheritable() for end in pair)
        assert list(tmp_path.iterdir()) == []
    finally:
        for end in pair:
            end.close()


# ---------------------------------------------------------------------------------------------------------------
# What cannot be sent, and what cannot be read.


@pytest.mark.parametrize("method", [2**70, "\ud800"])
def test_what_cannot_be_encoded_is_the_callers_error(ends, method):
    with pytest.raises(InvalidRequestError, match="cannot be sent"):
        ends.client.send(RpcCall(1, "workers", method))
    ends.client.send(AbortRequests(["next"]))
    assert receive(ends.engine).message.request_ids == ["next"]


@pytest.mark.parametrize(
    ("message", "buffers"),
    [(AbortRequests(["x" * 1000]), []), (RpcCall(1, "workers", "m"), [bytes(10_001)])],
    ids=["message", "buffer"],
)
def test_too_large_a_message_is_refused_before_it_is_sent(make_ends, message, buffers):
    ends = make_ends(LIMITS)
    with pytest.raises(InvalidRequestError, match=r"above the limit of 100.*send less per call"):
        ends.client.send(message, buffers)
    ends.client.send(RpcCall(2, "workers", "m"), [bytes(9_999), b"x"])
    assert receive(ends.engine).message.call_id == 2


def test_the_engine_too_refuses_before_it_sends(make_ends):
    ends = make_ends(LIMITS)
    with pytest.raises(ValueError, match="above the limit of 1000"):
        ends.engine.send(EngineDead(WireError("X", "x" * 1000)))
    with pytest.raises(ValueError, match="3 buffers is above the limit of 2"):
        ends.engine.send(RpcResult(1, [3]), [b"", b"", b""])
    ends.engine.send(RpcResult(2))
    assert receive(ends.client).message.call_id == 2


def test_more_ranks_may_send_more_buffers():
    assert FrameLimits.for_ranks(4).num_buffers == 4 * FrameLimits.for_ranks(1).num_buffers


def bad_frames():
    good = encoder().encode(AbortRequests(["good"]))
    return [
        (b"\xff\xff", []),
        (b"", []),
        (b"\x80", []),
        (good.replace(b"request_ids", b"request_idz"), []),
        (good[:-1], []),
        (encoder().encode(EngineDead(WireError("X", "y"))), []),
        (b"\x91" * 100_000, []),
        (good, [b"a buffer that no AbortRequests has"]),
    ]


@pytest.mark.parametrize("end", ["engine", "client"])
def test_a_message_that_is_none_is_counted_and_dropped(ends, end):
    receiver = vars(ends)[end]
    other = ends.raw_client if end == "engine" else socket.socket(fileno=os.dup(ends.engine.fileno()))
    frames = bad_frames()
    if end == "client":
        frames[5] = (encoder().encode(Shutdown()), [])
    for message, buffers in frames:
        for view in encode_frame(message, buffers, FrameLimits()):
            other.sendall(view)
    if end == "engine":
        ends.client.send(AbortRequests(["good"]))
        assert receive(receiver).message.request_ids == ["good"]
    else:
        ends.engine.send(RpcResult(7))
        assert receive(receiver).message.call_id == 7
        other.close()
    assert receiver.num_dropped == len(frames)


def test_drops_are_logged_once_a_second_with_their_number(ends, caplog, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(channel_module.time, "monotonic", lambda: now[0])

    def drop(num):
        for _ in range(num):
            for view in encode_frame(b"\xff", [], FrameLimits()):
                ends.raw_client.sendall(view)
        assert ends.engine.receive() is None

    with caplog.at_level(logging.WARNING):
        drop(5)
        now[0] += 0.9
        drop(3)
        assert len(caplog.records) == 1
        assert "dropped 1 unreadable" in caplog.text
        now[0] += 0.2
        drop(1)
    assert len(caplog.records) == 2
    assert "dropped 8 unreadable" in caplog.text
    assert ends.engine.num_dropped == 9


def test_a_broken_stream_is_the_end_of_the_client_for_the_engine(ends, caplog):
    ends.client.send(AbortRequests(["before"]))
    ends.raw_client.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert receive(ends.engine).message.request_ids == ["before"]
    for _ in range(2):
        with pytest.raises(StreamClosed):
            ends.engine.receive()
    assert "GET / HT" in caplog.text


def test_a_broken_stream_is_the_end_of_the_engine_for_the_client(make_ends):
    ends = make_ends(LIMITS, FrameLimits())
    ends.engine.send(RpcResult(1))
    ends.engine.send(RpcResult(2, [1]), [bytes(10_001)])
    assert receive(ends.client).message.call_id == 1
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="above the limit of 10000") as caught:
            ends.client.receive()
    assert caught.value.details["process"] == "engine"


# ---------------------------------------------------------------------------------------------------------------
# Ends.


def test_the_engine_reads_what_was_sent_before_its_client_went(ends):
    ends.client.send(AbortRequests(["last"]))
    ends.client.close()
    assert receive(ends.engine).message.request_ids == ["last"]
    for _ in range(2):
        with pytest.raises(StreamClosed):
            ends.engine.receive()
    ends.engine.send(RpcResult(1))  # to nobody: `receive` has said so
    assert not ends.engine.has_backlog


def test_the_client_reads_what_was_sent_before_the_engine_went(ends):
    ends.client.send(AbortRequests(["never read"]))
    ends.engine.send(EngineDead(WireError("X", "the cause")))
    ends.engine.close()
    assert receive(ends.client).message.error.message == "the cause"
    for _ in range(2):
        with pytest.raises(StreamClosed):
            ends.client.receive()
    with pytest.raises(StreamClosed):
        ends.client.send(AbortRequests(["x"]))


def test_a_backlog_has_a_while_to_leave_when_the_engine_closes(ends):
    payload = bytes(4 << 20)
    ends.engine.send(RpcResult(1, [1]), [payload])
    closing, outcome = in_thread(ends.engine.close, WAIT_S)
    assert receive(ends.client).buffers == [payload]
    closing.join(WAIT_S)
    assert outcome == [None]


def test_closing_does_not_wait_for_ever_for_a_client_that_does_not_read(ends):
    ends.engine.send(RpcResult(1, [1]), [bytes(4 << 20)])
    started = time.monotonic()
    ends.engine.close(0.1)
    assert 0.05 < time.monotonic() - started < WAIT_S
    ends.engine.close(0.1)


@pytest.mark.parametrize("what", ["engine_end", "closing"])
def test_a_send_that_waits_ends_with_the_engine_and_with_the_client(ends, what):
    fill(ends)
    sending, outcome = in_thread(ends.client.send, AbortRequests(["a"]))
    sending.join(0.1)
    assert sending.is_alive()
    os.eventfd_write(vars(ends)[what], 1)
    sending.join(WAIT_S)
    assert [type(error) for error in outcome] == [StreamClosed]


def test_a_send_that_waits_ends_when_the_socket_is_closed(ends):
    sending, outcome = in_thread(ends.client.send, RpcCall(0, "workers", "big"), [bytes(20 << 20)])
    sending.join(0.1)
    assert sending.is_alive()
    ends.engine.close()
    sending.join(WAIT_S)
    assert [type(error) for error in outcome] == [StreamClosed]


def test_deadlines_of_senders(ends):
    fill(ends)
    started = time.monotonic()
    with pytest.raises(TimeoutError):  # behind the rest of a message
        ends.client.send(AbortRequests(["late"]), deadline=started + 0.05)
    sending, outcome = in_thread(ends.client.send, AbortRequests(["patient"]))
    sending.join(0.1)
    with pytest.raises(TimeoutError):  # behind another thread
        ends.client.send(AbortRequests(["late"]), deadline=time.monotonic() + 0.05)
    assert time.monotonic() - started < WAIT_S
    assert [receive(ends.engine).message for _ in range(2)] == [
        RpcCall(0, "workers", "big"),
        AbortRequests(["patient"]),
    ]
    sending.join(WAIT_S)
    assert outcome == [None]
    assert ends.engine.receive() is None  # what was late was never sent


def test_a_message_that_is_cut_off_goes_on_with_what_it_was(ends):
    buffer = bytearray(b"1" * (20 << 20))
    with pytest.raises(TimeoutError):
        ends.client.send(RpcCall(0, "workers", "big"), [buffer], deadline=time.monotonic() + 0.05)
    buffer[:] = b"2" * len(buffer)
    sending, _ = in_thread(ends.client.send, AbortRequests(["next"]))
    assert receive(ends.engine).buffers == [b"1" * (20 << 20)]
    assert receive(ends.engine).message.request_ids == ["next"]
    sending.join(WAIT_S)


def test_hanging_up(ends):
    ends.client.send(AbortRequests(["a"]))
    ends.client.shutdown_write(Shutdown(), 1.0)
    with pytest.raises(StreamClosed):
        ends.client.send(AbortRequests(["b"]))
    assert [receive(ends.engine).message for _ in range(2)] == [AbortRequests(["a"]), Shutdown()]
    with pytest.raises(StreamClosed):
        ends.engine.receive()
    ends.engine.send(RpcResult(3))  # the other direction is open
    assert receive(ends.client).message.call_id == 3


def test_hanging_up_where_nothing_more_can_be_sent(ends):
    fill(ends)
    sending, outcome = in_thread(ends.client.send, AbortRequests(["a"]))
    sending.join(0.1)
    os.eventfd_write(ends.closing, 1)
    ends.client.shutdown_write(Shutdown(), WAIT_S)
    sending.join(WAIT_S)
    assert [type(error) for error in outcome] == [StreamClosed]
    with pytest.raises(StreamClosed):
        receive(ends.engine)


def test_hanging_up_on_an_engine_that_is_gone(ends):
    ends.engine.close()
    ends.client.shutdown_write(Shutdown(), 1.0)
    ends.client.close()
    ends.client.close()
    with pytest.raises(StreamClosed):
        ends.client.send(Shutdown())


def test_an_empty_batch_is_a_message(ends):
    ends.client.send(AddRequests([]))
    assert receive(ends.engine).message == AddRequests([])
