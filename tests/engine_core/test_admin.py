"""The admin endpoint: who gets in, how calls come and answers go, where it listens."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

import pytest
import zmq
from admin_peers import (
    ANY_PORT,
    METHODS,
    SILENCE_S,
    WAIT_S,
    RawPeer,
    echo,
    make_keys,
    open_endpoint,
    receive,
    served,
    wait_until,
)

from ringcore.engine_core.admin import curve_listener
from ringcore.engine_core.admin.curve_listener import CurveListener
from ringcore.engine_core.admin.listener import MAX_CALLS_IN_FLIGHT, admin_limits
from ringcore.errors import ConfigError
from ringcore.executor.value_codec import encode_request
from ringcore.protocol.codec import encoder
from ringcore.protocol.messages import RpcCall, RpcResult
from ringcore.protocol.operations import OPERATIONS
from ringcore.protocol.scopes import SCOPES

# ---------------------------------------------------------------------------------------------------------------
# Calls and answers.


def test_the_descriptor_wakes_for_each_of_many_calls(endpoint, peer):
    for call_id in range(200):
        peer.call(echo(call_id))
        got = receive(endpoint)
        assert got.call.call_id == call_id
        endpoint.send(got.caller, RpcResult(call_id))
        assert peer.receive()[0].call_id == call_id


def test_as_many_replies_as_calls_may_be_under_way_are_not_lost(endpoint, peer):
    for call_id in range(MAX_CALLS_IN_FLIGHT):
        peer.call(echo(call_id))
    calls = [receive(endpoint) for _ in range(MAX_CALLS_IN_FLIGHT)]
    for got in calls:
        endpoint.send(got.caller, RpcResult(got.call.call_id, [1]), [bytes(100_000)])
    assert [peer.receive()[0].call_id for _ in calls] == list(range(MAX_CALLS_IN_FLIGHT))
    assert endpoint.num_lost_replies == 0


def test_calls_of_the_engine_may_have_arguments(endpoint, peer):
    peer.call(RpcCall(1, "engine", "stats", timeout_s=1.0))
    got = receive(endpoint)
    assert (got.call.target, got.parts) == ("engine", [])
    arguments = encode_request("pause", ["all"], None)
    peer.send(encoder().encode(RpcCall(2, "engine", "pause", timeout_s=1.0)), *arguments)
    got = receive(endpoint)
    assert (got.call.method, [bytes(part) for part in got.parts]) == ("pause", arguments)
    peer.send(encoder().encode(RpcCall(3, "engine", "stats", timeout_s=1.0)), b"something")
    assert receive(endpoint, SILENCE_S) is None
    assert endpoint.num_dropped == 1


# ---------------------------------------------------------------------------------------------------------------
# Who gets in.


def strangers(keys):
    return {
        "an unknown key": lambda address: RawPeer(address, keys, secret=zmq.curve_keypair()[1]),
        "no key": lambda address: RawPeer(address, None),
        "a wrong server key": lambda address: RawPeer(address, keys, server=zmq.curve_keypair()[0]),
    }


@pytest.mark.parametrize("who", ["an unknown key", "no key", "a wrong server key"])
def test_a_stranger_gets_no_answer_and_does_no_harm(endpoint, peer, keys, who):
    with strangers(keys)[who](endpoint.address) as stranger:
        stranger.knock(echo())
        assert receive(endpoint, SILENCE_S) is None
        assert stranger.receive(SILENCE_S) is None
        assert endpoint.num_dropped == 0
        assert served(endpoint, peer)
    assert endpoint.num_rejected == (1 if who == "an unknown key" else 0)  # the others fail before they show a key


def test_a_refused_key_is_logged(endpoint, keys, caplog):
    with caplog.at_level(logging.WARNING), RawPeer(endpoint.address, keys, secret=zmq.curve_keypair()[1]) as stranger:
        stranger.knock(echo())
        wait_until(lambda: "refused 1 connections to the admin endpoint, the last from 127.0.0.1" in caplog.text)
    assert endpoint.num_rejected == 1


def test_without_a_zap_handler_every_connection_is_refused(monkeypatch, keys):
    class Absent:
        def __init__(self, context, clients, what) -> None:
            pass

        def join(self) -> None:
            pass

    monkeypatch.setattr(curve_listener, "ZapHandler", Absent)
    endpoint = open_endpoint(keys)
    try:
        with RawPeer(endpoint.address, keys) as peer:
            peer.knock(echo())
            assert receive(endpoint, SILENCE_S) is None
        assert endpoint.num_dropped == 0  # it did not even get to send
    finally:
        endpoint.close()


def test_a_plain_tcp_peer_does_no_harm(endpoint, peer):
    host, port = endpoint.address.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(1000))
        assert served(endpoint, peer)
    assert served(endpoint, peer, 1001)


def test_every_key_in_the_directory_is_let_in_and_its_calls_are_its_own(tmp_path):
    keys = make_keys(tmp_path)
    other = zmq.curve_keypair()
    (Path(keys) / "clients" / "ünï.key").write_text(
        f'metadata\n    scope = "call"\ncurve\n    public-key = "{other[0].decode()}"\n'
    )
    endpoint = open_endpoint(keys)
    try:
        with RawPeer(endpoint.address, keys) as first, RawPeer(endpoint.address, keys, secret=other[1]) as second:
            assert served(endpoint, first)
            assert served(endpoint, second)
    finally:
        endpoint.close()


# ---------------------------------------------------------------------------------------------------------------
# What a key may call.

CALLS = [  # target, method, the scope that it takes
    *(("engine", name, "read") for name in ("stats", "health", "is_sleeping", "methods")),
    *(("engine", name, "lifecycle") for name in ("pause", "resume")),
    *(("engine", name, "read") for name in ("start_trace", "stop_trace", "front_end_trace")),
    *(("engine", name, "read") for name in ("about", "snapshot", "requests", "kv_blocks", "stack")),
    *(("engine", name, "read") for name in ("step_times", "step_metrics")),
    *(("engine", name, "call") for name in ("reset_prefix_cache", "abort")),
    *((target, name, "lifecycle") for name in OPERATIONS for target in ("engine", "workers")),
    ("workers", "look", "read"),
    ("workers", "echo", "call"),
    ("workers", "join", "lifecycle"),
]


def test_each_call_that_is_public_is_among_them():
    """Operations are listed once, as the engine's."""
    listed = {(method.target, method.name, method.scope) for method in METHODS.listing()}
    by_workers = {call for call in CALLS if call[0] == "workers" and call[1] in OPERATIONS}
    assert listed == {*CALLS, ("workers", "slow", "call"), ("workers", "fail", "call")} - by_workers
    assert all(method.read_only == (method.scope == "read") for method in METHODS.listing())


@pytest.mark.parametrize("line", [*SCOPES, "read call lifecycle", "", None])
def test_a_key_calls_what_its_scopes_allow(tmp_path, line):
    keys = make_keys(tmp_path)
    file = Path(keys) / "clients" / "client.key"
    written = '    scope = "read call lifecycle"\n'
    assert written in file.read_text()
    file.write_text(file.read_text().replace(written, "" if line is None else f'    scope = "{line}"\n'))
    allowed = {"read"} if line is None else set(line.split())
    endpoint = open_endpoint(keys)
    try:
        with RawPeer(endpoint.address, keys) as peer:
            for call_id, (target, method, scope) in enumerate(CALLS):
                peer.call(RpcCall(call_id, target, method, timeout_s=60.0))
                if scope in allowed:
                    got = receive(endpoint)
                    assert (got.call.target, got.call.method) == (target, method)
                    endpoint.send(got.caller, RpcResult(call_id))
                    assert peer.receive()[0].error is None
                    continue
                wait_until(lambda: endpoint.receive() is not None or peer.socket.poll(0))
                error = peer.receive()[0].error
                assert error.type == "PermissionDeniedError"
                assert error.details == {"method": method, "scope": scope, "key": "client", "file": str(file)}
                for part in (repr(method), repr(scope), "the key 'client'", str(file)):
                    assert part in error.message
            assert endpoint.num_denied == sum(scope not in allowed for _, _, scope in CALLS)
            assert endpoint.num_dropped == 0
    finally:
        endpoint.close()


# ---------------------------------------------------------------------------------------------------------------
# Where it listens.


def test_a_port_in_use(endpoint, keys):
    with pytest.raises(ConfigError, match="the port is in use; give another one, or 0 to have one picked") as caught:
        CurveListener(endpoint.address, keys, admin_limits(1))
    assert caught.value.details["option"] == "admin_endpoint"


@pytest.mark.parametrize("address", ["tcp://192.0.2.1:0", "tcp://no-such-host.invalid:0"])
def test_an_address_of_another_host(keys, address):
    with pytest.raises(ConfigError, match=r"cannot listen there .*; give an address of this host"):
        CurveListener(address, keys, admin_limits(1))


@pytest.mark.parametrize("port", ["0", "*"])
def test_a_port_is_picked(keys, port):
    endpoint = CurveListener(f"tcp://127.0.0.1:{port}", keys, admin_limits(1))
    endpoint.close()
    assert int(endpoint.address.removeprefix("tcp://127.0.0.1:")) > 0


def test_nothing_listens_where_the_keys_are_unusable(tmp_path):
    with pytest.raises(ConfigError, match="no such directory"):
        CurveListener(ANY_PORT, str(tmp_path / "missing"), admin_limits(1))
