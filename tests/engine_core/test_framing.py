"""Frames on a stream: in whatever fragments they come, however small the socket, whoever interrupts."""

from __future__ import annotations

import dis
import random
import socket
import struct
import sys

import numpy as np
import pytest

from ringcore.engine_core.transport import frame_reader, framing
from ringcore.engine_core.transport.frame_reader import FrameReader
from ringcore.engine_core.transport.framing import (
    FrameError,
    FrameLimits,
    FrameWriter,
    StreamClosed,
    encode_frame,
    recorded,
)

LIMITS = FrameLimits(message_bytes=100, buffer_bytes=1000, num_buffers=3)
FRAMES = [(b"", []), (b"message", []), (b"m", [b""]), (b"", [b"ab", b"", b"c"]), (b"xyz", [b"1" * 20, b"2" * 30])]


@pytest.fixture
def pair():
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    yield ends
    for end in ends:
        end.close()


def raw(message, buffers=(), limits=LIMITS):
    return b"".join(encode_frame(message, buffers, limits))


def contents(frame):
    return bytes(frame.message), [bytes(buffer) for buffer in frame.buffers]


def header(num_buffers, message_bytes, magic=b"ringcor1"):
    return struct.pack("<8sII", magic, num_buffers, message_bytes)


@pytest.fixture(params=[False, True], ids=["frame by frame", "ahead"])
def reads_ahead(request):
    return request.param


def test_a_frame_whole(pair, reads_ahead):
    a, b = pair
    reader = FrameReader(b, LIMITS, reads_ahead=reads_ahead)
    for message, buffers in FRAMES:
        a.send(raw(message, buffers))
    for message, buffers in FRAMES:
        assert contents(reader.read()) == (message, buffers)
    assert reader.read() is None


@pytest.mark.parametrize(("message", "buffers"), FRAMES)
def test_a_frame_cut_at_every_byte(pair, reads_ahead, message, buffers):
    a, b = pair
    reader = FrameReader(b, LIMITS, reads_ahead=reads_ahead)
    data = raw(message, buffers) + raw(b"next")
    first = len(raw(message, buffers))
    for cut in range(1, len(data)):
        got = []
        for part in (data[:cut], data[cut:]):
            a.send(part)
            while (frame := reader.read()) is not None:
                got.append(contents(frame))
            assert len(got) == (0 if part is data[:cut] and cut < first else len(got))
        assert got == [(message, buffers), (b"next", [])]


def test_a_frame_byte_by_byte(pair, reads_ahead):
    a, b = pair
    reader = FrameReader(b, LIMITS, reads_ahead=reads_ahead)
    data = raw(b"xyz", [b"1" * 20, b"", b"2" * 30])
    for i in range(len(data)):
        assert reader.read() is None
        a.send(data[i : i + 1])
    assert contents(reader.read()) == (b"xyz", [b"1" * 20, b"", b"2" * 30])


def test_frames_read_ahead_are_seen_without_the_socket(pair):
    a, b = pair
    reader = FrameReader(b, LIMITS, reads_ahead=True)
    assert reader.may_have_more  # nothing is known yet
    a.send(raw(b"one") + raw(b"two", [b"2"]) + raw(b"three")[:20])
    assert contents(reader.read()) == (b"one", [])
    assert reader.has_read_ahead
    assert contents(reader.read()) == (b"two", [b"2"])
    assert reader.has_read_ahead  # a part of the next
    assert reader.read() is None
    assert not reader.has_read_ahead
    a.send(raw(b"three")[20:])
    assert contents(reader.read()) == (b"three", [])
    assert not reader.may_have_more
    a.close()
    for _ in range(2):
        with pytest.raises(StreamClosed):
            reader.read()
    assert not reader.has_read_ahead  # the end is no bytes


@pytest.mark.parametrize(
    ("message", "buffers", "limit_error"),
    [
        (100, [], None),
        (101, [], "a message of 101 bytes is above the limit of 100"),
        (0, [400, 600], None),
        (0, [400, 601], "buffers of 1001 bytes is above the limit of 1000"),
        (1, [1, 1, 1], None),
        (1, [0, 0, 0, 0], "4 buffers is above the limit of 3"),
    ],
)
def test_limits_at_both_ends(pair, message, buffers, limit_error):
    a, b = pair
    reader = FrameReader(b, LIMITS)
    made = bytes(message), [bytes(n) for n in buffers]
    if limit_error is None:
        a.send(raw(*made))
        assert contents(reader.read()) == made
        return
    with pytest.raises(ValueError, match=limit_error):
        encode_frame(*made, LIMITS)
    a.send(raw(*made, FrameLimits()))  # a peer that has no limits
    for _ in range(2):
        with pytest.raises(FrameError, match=limit_error):
            reader.read()


def test_what_is_no_frame_is_the_end_of_the_stream(pair):
    a, b = pair
    reader = FrameReader(b, LIMITS)
    a.send(header(0, 1, magic=b"ringcor2") + b"x" + raw(b"good"))
    for _ in range(3):
        with pytest.raises(FrameError, match="ringcor2"):
            reader.read()


@pytest.mark.parametrize(
    "lengths", [[2**64 - 1], [2**63, 2**63, 2**63], [1001], [1000, 1]], ids=["max", "sum overflows", "over", "sum over"]
)
def test_huge_lengths_allocate_nothing(pair, lengths):
    a, b = pair
    a.send(header(len(lengths), 0) + struct.pack(f"<{len(lengths)}Q", *lengths))
    with pytest.raises(FrameError, match="above the limit"):
        FrameReader(b, LIMITS).read()


def test_huge_counts_allocate_nothing(pair):
    a, b = pair
    for num_buffers, message_bytes in ((2**32 - 1, 0), (0, 2**32 - 1)):
        a.send(header(num_buffers, message_bytes))
        with pytest.raises(FrameError, match="above the limit"):
            FrameReader(b, FrameLimits()).read()


def test_random_bytes_are_never_more_than_a_typed_error(pair):
    a, b = pair
    rng = random.Random(7)
    good = raw(b"message", [b"abc", b"d"])
    for _ in range(3000):
        data = bytearray(good)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        a.send(data[: rng.randint(1, len(data))])
        reader = FrameReader(b, LIMITS)
        try:
            frame = reader.read()
        except FrameError:
            pass
        else:
            assert frame is None or len(frame.message) <= 100
        try:
            b.recv(1 << 16)  # what is left
        except BlockingIOError:
            continue


@pytest.mark.parametrize("cut", [0, 5, 16, 30])
def test_a_closed_stream_also_in_the_middle_of_a_frame(pair, cut):
    a, b = pair
    a.send(raw(b"whole"))
    a.send(raw(b"cut", [b"buffer" * 4])[:cut])
    a.close()
    reader = FrameReader(b, LIMITS)
    assert contents(reader.read()) == (b"whole", [])
    for _ in range(2):
        with pytest.raises(StreamClosed):
            reader.read()


def test_one_read_takes_a_bounded_part(pair):
    a, b = pair
    limits = FrameLimits()
    a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    writer, reader = FrameWriter(a), FrameReader(b, limits, bytes_per_read=50_000)
    payload = random.Random(1).randbytes(2_000_000)
    writer.push(encode_frame(b"big", [payload], limits))
    num_reads = 0
    while (frame := reader.read()) is None:
        writer.write()
        num_reads += 1
    assert num_reads >= 5
    assert contents(frame) == (b"big", [payload])


# ---------------------------------------------------------------------------------------------------------------
# Writing.


def test_what_the_socket_does_not_take_waits(pair):
    a, b = pair
    limits = FrameLimits()
    writer, reader = FrameWriter(a), FrameReader(b, limits)
    sent = []
    for i in range(300):
        message, buffers = bytes([i % 256]) * (i * 331 % 9000), [bytes([i % 7]) * (i * 977 % 20_000)] * (i % 3)
        writer.push(encode_frame(message, buffers, limits))
        sent.append((message, buffers))
        writer.write()
    assert writer.has_backlog
    got = []
    while len(got) < 300:
        frame = reader.read()
        if frame is None:
            assert writer.num_waiting_bytes
            writer.write()
        else:
            got.append(contents(frame))
    assert got == sent
    assert not writer.has_backlog
    assert writer.num_waiting_bytes == 0


def test_buffers_are_not_copied_unless_that_is_asked_for(pair):
    a, b = pair
    limits = FrameLimits()
    writer, reader = FrameWriter(a), FrameReader(b, limits)
    array = np.zeros(4_000_000, np.uint8)
    writer.push(encode_frame(b"", [memoryview(array)], limits))
    assert not writer.write()
    array[-1] = 1  # seen: it is still the caller's memory
    writer.copy_backlog()
    array[-2] = 1  # not seen
    while (frame := reader.read()) is None:
        writer.write()
    assert frame.buffers[0][-2:] == b"\x00\x01"


def test_writing_to_nobody(pair):
    a, b = pair
    b.close()
    writer = FrameWriter(a)
    writer.push(encode_frame(b"x", [], LIMITS))
    with pytest.raises(StreamClosed):
        writer.write()


# ---------------------------------------------------------------------------------------------------------------
# Interrupts.


def test_recorded_appends_what_the_call_returned():
    results: list = []
    recorded(results, divmod, 7, 2)
    assert results == [(3, 1)]
    with pytest.raises(ZeroDivisionError):
        recorded(results, divmod, 7, 0)
    assert results == [(3, 1)]


class Interrupt(Exception):
    pass


# Python runs no signal handler right before these two. What is raised there leaves the exception that is being handled
# in flight for good, as the context of every later one in this thread.
NEVER_INTERRUPTED = {dis.opmap["PUSH_EXC_INFO"], dis.opmap["POP_EXCEPT"]}


def interrupted_at(number, call):
    """Whether `call` was interrupted at the `number`-th bytecode that it runs in framing.py or
    frame_reader.py, as by a signal handler."""
    left = number
    in_flight = sys.exc_info()[1]

    def trace(frame, event, argument):
        nonlocal left
        if frame.f_code.co_filename not in (framing.__file__, frame_reader.__file__):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode" and frame.f_code.co_code[frame.f_lasti] not in NEVER_INTERRUPTED:
            left -= 1
            if left == 0:
                raise Interrupt
        return trace

    was_interrupted = False
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except Interrupt:
        was_interrupted = True
    finally:
        sys.settrace(before)
    assert sys.exc_info()[1] is in_flight
    return was_interrupted


FIRST, SECOND = (b"first", [b"1" * 1000, b"2" * 9000]), (b"second", [b"3"])


@pytest.mark.parametrize("in_parts", [False, True])
def test_an_interrupt_at_any_point_of_a_write_tears_nothing(pair, in_parts):
    a, b = pair
    limits = FrameLimits()
    a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 if in_parts else 1 << 20)
    number = 0
    while True:
        number += 1
        writer, reader = FrameWriter(a), FrameReader(b, limits)
        writer.push(encode_frame(*FIRST, limits))
        was_interrupted = interrupted_at(number, writer.write)
        writer.push(encode_frame(*SECOND, limits))
        got = []
        while len(got) < 2:
            writer.write()
            if (frame := reader.read()) is not None:
                got.append(contents(frame))
        assert got == [FIRST, SECOND]
        assert not writer.has_backlog
        if not was_interrupted:
            break
    assert number > 50


def test_an_interrupted_push_is_done_or_not(pair):
    a, b = pair
    limits = FrameLimits()
    num_whole = num_interrupts = 0
    while True:
        writer, reader = FrameWriter(a), FrameReader(b, limits)
        frame = encode_frame(b"maybe", [b"buffer"], limits)
        if not interrupted_at(num_interrupts + 1, lambda w=writer, f=frame: w.push(f)):
            break
        num_interrupts += 1
        writer.push(encode_frame(*SECOND, limits))
        writer.write()
        first = contents(reader.read())
        if first == (b"maybe", [b"buffer"]):
            num_whole += 1
            first = contents(reader.read())
        assert first == SECOND
    assert 0 < num_whole < num_interrupts


def test_an_interrupted_read_goes_on_where_it_was(pair, reads_ahead):
    a, b = pair
    limits = FrameLimits()
    a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    writer, got = FrameWriter(a), []
    number = num_lost = 0
    was_interrupted = True

    def read_all(reader):
        for _ in range(3 if reads_ahead else 7):
            if (frame := reader.read()) is not None:
                got.append(contents(frame))

    while was_interrupted:
        number += 1
        got.clear()
        reader = FrameReader(b, limits, None if reads_ahead else 4000, reads_ahead=reads_ahead)
        for frame in (FIRST, SECOND):
            writer.push(encode_frame(*frame, limits))
        assert writer.write()
        was_interrupted = interrupted_at(number, lambda reader=reader: read_all(reader))
        read_all(reader)
        if got != [FIRST, SECOND]:
            num_lost += 1  # by an interrupt between its last byte and its hand-over
            assert was_interrupted
            assert got in ([FIRST], [SECOND])
    assert number > 200
    assert num_lost < 40  # two frames, a few bytecodes each
