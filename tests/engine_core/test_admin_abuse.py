"""The admin endpoint and those who misuse it: none of them harms the engine or another client."""

from __future__ import annotations

import logging
import select

import msgspec
import pytest
from admin_peers import SILENCE_S, RawPeer, echo, open_endpoint, receive, served, wait_until

from ringcore.curve import logged_counter
from ringcore.engine_core.admin.endpoint import MAX_TIMEOUT_S
from ringcore.engine_core.admin.listener import MAX_CALLS_IN_FLIGHT
from ringcore.engine_core.transport.framing import FrameLimits
from ringcore.executor.value_codec import encode_request, encode_value
from ringcore.protocol.codec import encoder
from ringcore.protocol.messages import RpcCall, RpcResult

# ---------------------------------------------------------------------------------------------------------------
# What is malformed.

REQUEST = encode_request("echo", [], None)
CALL = encoder().encode(echo())
ENGINE_CALL = encoder().encode(RpcCall(1, "engine", "stats", timeout_s=60.0))
GARBAGE = {
    "empty": [b""],
    "no msgpack": [b"\xc1" * 40],
    "another message": [encoder().encode(RpcResult(1))],
    "no arguments": [CALL],
    "arguments that are none": [CALL, b"\xc1"],
    "two arguments": [CALL, encode_value(["echo", []])[0]],
    "another method's arguments": [CALL, *encode_request("load_model", [], None)],
    "arguments of what is the engine's": [CALL, *encode_request("shutdown", [], None)],
    "arguments of a call of the engine's, for another": [ENGINE_CALL, *encode_request("pause", [], None)],
    "a claim to be internal": [encoder().encode(msgspec.structs.asdict(echo()) | {"type": "rpc", "by_engine": True})],
    "a packed function as a method": [CALL, encode_value([b"\x80\x05.", [], {}])[0]],
    "too many buffers": [CALL, *REQUEST, *[b"x"] * 64],
    "deep nesting": [CALL, b"\x93\xa4echo" + b"\x91" * 100_000],
    "an unknown field": [CALL[:1].replace(CALL[:1], bytes([CALL[0] + 1])) + CALL[1:] + b"\xa1x\x01", *REQUEST],
    "a call id that is none": [CALL.replace(b"\xa7call_id\x01", b"\xa7call_id\xc0"), *REQUEST],
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_counted_and_dropped_and_neighbours_are_served(endpoint, peer, keys, name):
    with RawPeer(endpoint.address, keys) as vandal:
        assert served(endpoint, peer)
        for _ in range(3):
            vandal.send(*GARBAGE[name])
            assert served(endpoint, peer)
        wait_until(lambda: endpoint.receive() is None and endpoint.num_dropped == 3)
        assert vandal.receive(0.0) is None
        assert served(endpoint, vandal)


def test_a_message_above_the_limit_is_refused(keys):
    endpoint = open_endpoint(keys, limits=FrameLimits(1000, 100_000, 8))
    try:
        with RawPeer(endpoint.address, keys) as peer, RawPeer(endpoint.address, keys) as vandal:
            body, large = encoder().encode(echo()), bytes(60_000)
            peer.send(body, *REQUEST, bytes(100_000 - len(REQUEST[0])))
            assert receive(endpoint).call.call_id == 1
            peer.send(encoder().encode(echo(2)), *REQUEST, bytes(100_001 - len(REQUEST[0])))
            peer.send(encoder().encode(echo(3)), *REQUEST, large, large)
            assert receive(endpoint, SILENCE_S) is None
            assert endpoint.num_dropped == 2
            vandal.send(encoder().encode(echo(4)), *REQUEST, bytes(1 << 20))  # this one the socket does not even take
            assert receive(endpoint, SILENCE_S) is None
            assert served(endpoint, peer)
            with pytest.raises(ValueError, match="above the limit of 100000"):
                endpoint.send(b"x", RpcResult(1), [large, large])
    finally:
        endpoint.close()


def test_a_flood_is_logged_once_a_second(endpoint, peer, caplog, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(logged_counter.time, "monotonic", lambda: clock[0])
    with caplog.at_level(logging.WARNING):
        for _ in range(100):
            peer.send(b"garbage")
        drain(endpoint, 100)
        lines = caplog.messages
        assert len(lines) == 1
        assert lines[0].startswith("dropped 1 malformed messages")
        clock[0] += 1.5
        peer.send(b"garbage")
        drain(endpoint, 101)
        assert caplog.messages[1].startswith("dropped 100 malformed messages of admin clients, the last one: ")
        assert len(caplog.messages) == 2


def drain(endpoint, num_dropped):
    for _ in range(10_000):
        assert endpoint.receive() is None
        if endpoint.num_dropped == num_dropped:
            return
        select.select([], [], [], 0.001)
    raise AssertionError(f"{endpoint.num_dropped} of {num_dropped} came")


def test_a_flood_does_not_hold_the_engine_up(endpoint, peer):
    for _ in range(100):
        peer.send(b"garbage")
    wait_until(lambda: endpoint.has_messages)
    endpoint.receive()
    assert 0 < endpoint.num_dropped < 100


# ---------------------------------------------------------------------------------------------------------------
# What is well-formed and still not done.


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (echo(is_callable=True), "an admin client may not send functions"),
        (echo(timeout_s=None), "timeout=None: give seconds, at most 86400"),
        (echo(timeout_s=-1.0), "timeout=-1.0"),
        (echo(timeout_s=float("nan")), "timeout=nan"),
        (echo(timeout_s=MAX_TIMEOUT_S + 1), "timeout=86401.0"),
        (RpcCall(1, "workers", "m" * 257, timeout_s=1.0), "more than 256 characters"),
        (
            RpcCall(1, "workers", "ecko", timeout_s=1.0),
            "no worker method 'ecko' is declared with @rpc; did you mean",
        ),
        (RpcCall(1, "workers", "shutdown", timeout_s=1.0), "only the engine itself calls it on its workers; close its"),
        (RpcCall(1, "engine", "shutdown", timeout_s=1.0), "method='shutdown': give one of abort, about, "),
        (RpcCall(1, "executor", "echo", timeout_s=1.0), "target='executor': give one of engine, workers"),
        (RpcCall(1, "workers", "pause", timeout_s=1.0), "it is a method of the engine, not of its workers; call it"),
    ],
)
def test_what_may_not_be_asked_is_that_calls_error(endpoint, peer, call, says):
    peer.call(call)
    assert receive(endpoint, SILENCE_S) is None
    result, _ = peer.receive()
    assert (result.call_id, result.error.type) == (1, "InvalidRequestError")
    assert says in result.error.message
    assert endpoint.num_dropped == 0
    assert served(endpoint, peer)


def test_the_calls_of_a_key_are_bounded_over_all_its_connections(endpoint, peer, keys):
    with RawPeer(endpoint.address, keys) as second:
        calls = []
        for call_id in range(MAX_CALLS_IN_FLIGHT):
            (peer if call_id % 2 else second).call(echo(call_id))
            calls.append(receive(endpoint))
        peer.call(echo(100))
        assert receive(endpoint, SILENCE_S) is None
        result, _ = peer.receive()
        assert result.call_id == 100
        assert f"{MAX_CALLS_IN_FLIGHT} calls of 'client' are in flight" in result.error.message
        endpoint.send(calls[0].caller, RpcResult(calls[0].call.call_id))
        peer.call(echo(101))
        assert receive(endpoint).call.call_id == 101


def test_a_call_id_that_is_under_way_is_not_taken_twice(endpoint, peer):
    peer.call(echo(1))
    receive(endpoint)
    peer.call(echo(1))
    assert receive(endpoint, SILENCE_S) is None
    assert endpoint.num_dropped == 1


# ---------------------------------------------------------------------------------------------------------------
# Clients that do not take their replies.


def test_a_client_that_is_gone_loses_its_reply(endpoint, peer, keys):
    with RawPeer(endpoint.address, keys) as leaver:
        leaver.call(echo())
        got = receive(endpoint)
    wait_until(lambda: lose_reply(endpoint, got.caller))
    assert served(endpoint, peer)


def lose_reply(endpoint, identity) -> bool:
    before = endpoint.num_lost_replies
    endpoint.send(identity, RpcResult(1))
    return endpoint.num_lost_replies > before


def test_a_client_that_does_not_read_loses_replies_and_blocks_nobody(endpoint, peer, keys):
    with RawPeer(endpoint.address, keys, waiting=1) as sleeper:
        sleeper.call(echo())
        got = receive(endpoint)
        megabyte = bytes(1 << 20)
        for call_id in range(200):
            endpoint.send(got.caller, RpcResult(call_id, [1]), [megabyte])
        assert endpoint.num_lost_replies > 0
        assert served(endpoint, peer)
