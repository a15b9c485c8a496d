"""Malformed bytes into every decoder of messages: a typed error, soon, with little memory; no crash and no hang."""

from __future__ import annotations

import os
import random
import socket

import msgspec
import numpy as np
import pytest
from fuzzing import Watch, mutated, mutated_parts, owned

from ringcore import SamplingParams
from ringcore.engine_core.transport.channel import ClientChannel, EngineChannel, FrameLimits, StreamClosed
from ringcore.engine_core.transport.framing import encode_frame
from ringcore.errors import RingcoreError
from ringcore.executor.ring_memory import RingCorruptError
from ringcore.executor.value_codec import (
    decode_error,
    decode_request,
    decode_value,
    encode_error,
    encode_request,
    encode_value,
)
from ringcore.executor.wire import CALL, CallHead, pack_call, pack_reply, pack_step, unpack_call, unpack_reply
from ringcore.protocol.codec import decoder, encoder, int_array
from ringcore.protocol.messages import (
    AbortRequests,
    AddRequests,
    ClientMessage,
    EngineMessage,
    EngineReady,
    RpcCall,
    RpcResult,
    Shutdown,
)
from ringcore.protocol.requests import (
    EngineCoreOutput,
    EngineCoreRequest,
    EngineStats,
    OutputColumns,
    StartedRequest,
    TokenLogprobs,
)
from ringcore.protocol.steps import ModelRunnerOutput, NewBlocks, SchedulerOutput

VALUES = [
    None,
    {"a": [1, 2.5, "x", b"y", None, True], "b": {"c": [[[]]]}},
    np.arange(20, dtype=np.int64).reshape(4, 5),
    [np.ones((100, 30), np.float64), np.zeros(0, np.float32), np.ones(3000, np.int16), "tail"],
]


def test_values(num_malformed, seed):
    rng, watch = random.Random(seed), Watch()
    frames = [owned(encode_value(value)) for value in VALUES]
    while watch.num_attempts < num_malformed:
        parts = mutated_parts(rng.choice(frames), rng)
        with watch.attempt(msgspec.DecodeError):
            decode_value(parts)
    watch.check(num_malformed)


def test_requests(num_malformed, seed):
    rng, watch = random.Random(seed), Watch()
    frames = [owned(encode_request("echo", [value], {"times": 3})) for value in VALUES]
    while watch.num_attempts < num_malformed:
        parts = mutated_parts(rng.choice(frames), rng)
        with watch.attempt(msgspec.DecodeError):
            method, args, kwargs = decode_request(parts)
            assert isinstance(method, str | bytes)
            assert isinstance(args, list)
            assert isinstance(kwargs, dict)
    watch.check(num_malformed)


def test_errors(num_malformed, seed):
    rng, watch = random.Random(seed), Watch()
    frames = [encode_error(error, 1, "m") for error in (KeyError("x"), RingcoreError("y", a=[1]), ValueError("é" * 99))]
    while watch.num_attempts < num_malformed:
        data = mutated(rng.choice(frames), rng)
        with watch.attempt(msgspec.DecodeError):
            assert isinstance(decode_error(data, 1, "m"), RingcoreError)
    watch.check(num_malformed)


def test_envelopes(num_malformed, seed):
    rng, watch = random.Random(seed), Watch()
    frames = [
        pack_call(CallHead(7, CALL, 1, "echo"), [b"body", b"buffer"]),
        pack_step(8, b"body"),
        pack_call(CallHead(9, CALL, None, "echo", by_engine=True), [b"body"]),
        pack_reply(7, 1, CALL, True, [b"x"]),
    ]
    while watch.num_attempts < num_malformed:
        parts = [memoryview(part) for part in mutated_parts(rng.choice(frames), rng)]
        with watch.attempt(RingCorruptError):
            unpack_call(parts)
        with watch.attempt(RingCorruptError):
            unpack_reply(parts, 1)
    watch.check(num_malformed)


# ---------------------------------------------------------------------------------------------------------------
# Messages of the protocol, and the stream between client and engine.


def client_messages() -> list[ClientMessage]:
    request = EngineCoreRequest("r", [1, 2, 3] * 20, SamplingParams(max_tokens=5), arrival_s=1.0)
    return [
        AddRequests([request, request]),
        AbortRequests(["r", "s"]),
        RpcCall(1, "workers", "echo", timeout_s=1.0),
        Shutdown(),
    ]


def engine_messages() -> list[EngineMessage]:
    output = EngineCoreOutput("r", [1, 2], [TokenLogprobs([1], [-0.5], [1])], "length")
    return [
        EngineReady(9, 8, 72, 64, 1.5, {"load_model": 1.0}, [{"total": 5}], {"engine": 1}, 2048),
        OutputColumns(
            [StartedRequest(0, "r", 0, 1.5, 0)],
            int_array([0]),
            int_array([7]),
            None,
            [output, output],
            EngineStats(*range(7)),
        ),
        RpcResult(1, [2]),
    ]


def steps() -> list[SchedulerOutput | ModelRunnerOutput]:
    return [
        SchedulerOutput(
            1,
            1,
            int_array([1]),
            [],
            [NewBlocks(int_array([2]), int_array([3]))],
            int_array([0, 1]),
            int_array([1, 1]),
            2,
        ),
        ModelRunnerOutput(1, int_array([0, 1]), int_array([5, 6])),
    ]


@pytest.mark.parametrize(
    ("kind", "messages"),
    [
        (ClientMessage, client_messages()),
        (EngineMessage, engine_messages()),
        (SchedulerOutput, steps()[:1]),
        (ModelRunnerOutput, steps()[1:]),
    ],
    ids=["client", "engine", "step", "output"],
)
def test_messages(num_malformed, seed, kind, messages):
    rng, watch = random.Random(seed), Watch()
    frames = [encoder().encode(message) for message in messages]
    read = decoder(kind)
    while watch.num_attempts < num_malformed:
        data = mutated(rng.choice(frames), rng)
        with watch.attempt(msgspec.MsgspecError, ValueError, RecursionError):
            read.decode(data)
    watch.check(num_malformed)


class Stream:
    """A channel, and a raw socket at its other end."""

    def __init__(self, make) -> None:
        self.peer, ours = socket.socketpair()
        self.peer.setblocking(False)
        self.channel = make(ours)

    def close(self) -> None:
        self.channel.close()
        self.peer.close()


@pytest.mark.parametrize("side", ["engine", "client"])
def test_streams(num_malformed, seed, side, caplog):
    """What is no message is dropped and counted, and the next one is read; what is no frame ends the stream."""
    caplog.set_level("CRITICAL")
    rng, watch = random.Random(seed), Watch()
    event = os.eventfd(0)

    def make(sock: socket.socket):
        limits = FrameLimits(message_bytes=1 << 20, buffer_bytes=1 << 20)
        if side == "engine":
            return EngineChannel(sock.detach(), limits)
        return ClientChannel(sock, event, event, limits)

    messages = client_messages() if side == "engine" else engine_messages()
    frames = [encoder().encode(message) for message in messages]
    stream = Stream(make)
    num_ended = 0
    while watch.num_attempts < num_malformed:
        body = rng.choice(frames)
        whole = b"".join(
            encode_frame(
                mutated(body, rng) if rng.random() < 0.7 else body, [b"x"] * rng.choice([0, 0, 2]), FrameLimits()
            )
        )
        data = mutated(whole, rng) if rng.random() < 0.3 else whole
        stream.peer.send(data[: 100 << 10])
        with watch.attempt(StreamClosed, RingcoreError):
            while stream.channel.receive() is not None:
                pass
            if stream.channel.num_dropped > 50 or rng.random() < 0.05:
                watch.num_refused += stream.channel.num_dropped
                raise StreamClosed
            continue
        num_ended += 1
        stream.close()
        stream = Stream(make)
    stream.close()
    os.close(event)
    assert num_ended > 10
    watch.check(num_malformed)
