"""The engine's private socket: what it promises like the TCP endpoint, who gets in, and what is left of it."""

from __future__ import annotations

import os
import resource
import select
import subprocess
import sys
import threading
from contextlib import closing, suppress
from pathlib import Path

import pytest
from admin_peers import (
    METHODS,
    NOBODY,
    SILENCE_S,
    WAIT_S,
    LocalPeer,
    echo,
    local_name,
    needs_root,
    receive,
    served,
    wait_until,
)

from ringcore.engine_core.admin import endpoint as admin_endpoint
from ringcore.engine_core.admin import local_listener
from ringcore.engine_core.admin.endpoint import AdminEndpoint
from ringcore.engine_core.admin.listener import MAX_CALLS_IN_FLIGHT
from ringcore.engine_core.admin.local_listener import MAX_CONNECTIONS, LocalListener
from ringcore.engine_core.transport.framing import FrameLimits, encode_frame
from ringcore.protocol.codec import encoder
from ringcore.protocol.messages import RpcCall, RpcResult

LIMITS = FrameLimits(100_000, 4 << 20, 64)


@pytest.fixture
def name():
    return local_name()


@pytest.fixture
def endpoint(name):
    made = AdminEndpoint([LocalListener(name, LIMITS)], LIMITS)
    made.serve(METHODS)
    yield made
    made.close()


@pytest.fixture
def peer(endpoint, name):
    with LocalPeer(name) as made:
        yield made


# ---------------------------------------------------------------------------------------------------------------
# Calls and answers.


def test_a_message_that_comes_byte_by_byte(endpoint, peer):
    frame = b"".join(encode_frame(encoder().encode(RpcCall(3, "engine", "stats", timeout_s=1.0)), [], LIMITS))
    for byte in frame:
        assert endpoint.receive() is None
        peer.send_bytes(bytes([byte]))
    assert receive(endpoint).call.call_id == 3


def test_large_replies_are_written_as_the_client_reads(endpoint, peer):
    sizes = [1 << 20] * 3
    for call_id, _ in enumerate(sizes):
        peer.call(echo(call_id))
        got = receive(endpoint)
        endpoint.send(got.caller, RpcResult(call_id, [1]), [bytes([call_id]) * sizes[call_id]])
    for call_id, size in enumerate(sizes):
        while (answer := peer.receive(0.0)) is None:
            endpoint.receive()
        assert answer == (RpcResult(call_id, [1]), [bytes([call_id]) * size])
    assert endpoint.num_lost_replies == 0


def test_the_loop_looks_when_its_poll_says_so_and_now_and_then(endpoint, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(admin_endpoint.time, "monotonic", lambda: clock[0])
    assert endpoint.is_due
    assert endpoint.receive() is None
    assert not endpoint.is_due
    endpoint.notice({12345})
    assert not endpoint.is_due
    endpoint.notice({12345, *endpoint.fds})
    assert endpoint.is_due
    assert endpoint.receive() is None
    clock[0] += 0.9e-3
    assert not endpoint.is_due
    clock[0] += 0.2e-3
    assert endpoint.is_due


def test_the_end_closes_every_connection(endpoint, peer, name):
    with LocalPeer(name) as late:  # the engine never gets to accept it
        endpoint.close(5.0)
        assert peer.is_closed()
        assert late.is_closed()


def test_a_reply_that_waits_is_written_before_the_end(endpoint, peer):
    peer.call(echo(1))
    got = receive(endpoint)
    endpoint.send(got.caller, RpcResult(1, [1]), [bytes(2 << 20)])  # more than the socket takes at once
    answers = []
    thread = threading.Thread(target=lambda: answers.append(peer.receive()))
    thread.start()
    endpoint.close(WAIT_S)
    thread.join(WAIT_S)
    assert len(answers[0][1][0]) == 2 << 20


# ---------------------------------------------------------------------------------------------------------------
# Those who misuse it.


@pytest.mark.parametrize("garbage", [[b""], [b"\xc1" * 40], [encoder().encode(RpcResult(1))]])
def test_a_message_that_is_none_is_dropped_and_its_sender_still_served(endpoint, peer, name, garbage):
    with LocalPeer(name) as vandal:
        vandal.send(*garbage)
        assert served(endpoint, peer)
        wait_until(lambda: endpoint.receive() is None and endpoint.num_dropped == 1)
        assert served(endpoint, vandal)


def test_bytes_that_are_no_frame_end_that_connection_alone(endpoint, peer, name):
    with LocalPeer(name) as vandal:
        vandal.send_bytes(b"GET / HTTP/1.1\r\n\r\n")
        assert receive(endpoint, SILENCE_S) is None
        assert vandal.is_closed()
    assert endpoint.num_dropped == 1
    assert served(endpoint, peer)


def test_a_message_above_a_limit_ends_its_connection(endpoint, peer, name):
    no_limits = FrameLimits(num_buffers=100)
    for message, *buffers in ([bytes(100_001)], [b"", bytes(3 << 20), bytes(3 << 20)], [b"", *[b"x"] * 65]):
        with LocalPeer(name) as vandal:
            vandal.send_bytes(b"".join(encode_frame(message, buffers, no_limits))[:2000])  # it is known by its head
            assert receive(endpoint, 0.05) is None
            assert vandal.is_closed()
    assert endpoint.num_dropped == 3
    assert served(endpoint, peer)


def test_a_client_that_does_not_read_loses_replies_and_blocks_nobody(endpoint, peer, name):
    with LocalPeer(name) as sleeper:
        sleeper.call(echo())
        got = receive(endpoint)
        for call_id in range(20):
            endpoint.send(got.caller, RpcResult(call_id, [1]), [bytes(1 << 20)])
        assert 10 < endpoint.num_lost_replies < 20  # the backlog is bounded by one reply's size and one more
        assert served(endpoint, peer)


def test_a_client_that_leaves_loses_its_reply(endpoint, peer, name):
    with LocalPeer(name) as leaver:
        leaver.call(echo())
        got = receive(endpoint)
    assert receive(endpoint, 0.05) is None
    endpoint.send(got.caller, RpcResult(1))
    assert endpoint.num_lost_replies == 1
    assert served(endpoint, peer)


def test_the_calls_of_a_process_are_bounded(endpoint, peer):
    calls = []
    for call_id in range(MAX_CALLS_IN_FLIGHT):
        peer.call(echo(call_id))
        calls.append(receive(endpoint))
    peer.call(echo(100))
    assert receive(endpoint, 0.05) is None
    assert f"{MAX_CALLS_IN_FLIGHT} calls of 'process {os.getpid()}' are in flight" in peer.receive()[0].error.message
    endpoint.send(calls[0].caller, RpcResult(0))
    peer.call(echo(101))
    assert receive(endpoint).call.call_id == 101


def test_connections_are_bounded(endpoint, name):
    peers = [LocalPeer(name) for _ in range(MAX_CONNECTIONS)]
    wait_until(lambda: endpoint.receive() is None)
    with LocalPeer(name) as one_more:
        assert receive(endpoint, 0.05) is None
        assert one_more.is_closed()
    assert endpoint.num_rejected == 1
    peers.pop().close()
    assert receive(endpoint, 0.05) is None
    with LocalPeer(name) as next_one:
        assert served(endpoint, next_one)
    for peer in peers:
        peer.close()


def test_without_descriptors_a_connection_is_turned_away_and_the_rest_goes_on(endpoint, peer, name):
    assert served(endpoint, peer)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    late = LocalPeer(name)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
        fillers = []
        with suppress(OSError):
            while True:
                fillers.append(os.dup(0))
        for _ in range(3):
            endpoint.receive()
        for fd in fillers:
            os.close(fd)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert late.is_closed()
    assert endpoint.num_rejected == 1
    assert select.select(list(endpoint.fds), [], [], 0.0)[0] == []  # it is not signalled for ever
    with LocalPeer(name) as next_one:
        assert served(endpoint, next_one)


# ---------------------------------------------------------------------------------------------------------------
# Who gets in.

STRANGER = """
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
peer.connect(b"\\0" + sys.argv[1].encode())
try:
    peer.sendall(bytes.fromhex(sys.argv[2]))
    print(len(peer.recv(100)))
except ConnectionError:
    print(0)
"""


@needs_root
def test_another_user_is_refused_before_a_byte_is_read(endpoint, peer, name, caplog):
    frame = b"".join(encode_frame(encoder().encode(RpcCall(1, "engine", "stats", timeout_s=1.0)), [], LIMITS))
    stranger = subprocess.Popen(
        [sys.executable, "-c", STRANGER, str(name), frame.hex()], stdout=subprocess.PIPE, text=True
    )
    wait_until(lambda: endpoint.receive() is None and endpoint.num_rejected == 1)
    assert stranger.communicate(timeout=WAIT_S)[0] == "0\n"
    assert served(endpoint, peer)
    assert f"the last one: user {NOBODY}, process {stranger.pid}: another user" in caplog.text


def test_root_and_the_engines_own_user_get_in(monkeypatch, name):
    monkeypatch.setattr(local_listener.os, "geteuid", lambda: 4711)
    with closing(LocalListener(name, LIMITS)) as listener:
        assert listener._users == {0, 4711}


def test_nothing_is_left_of_the_name(name):
    def is_listed() -> bool:
        return f"@{name}" in Path("/proc/net/unix").read_text()

    with closing(LocalListener(name, LIMITS)):
        assert is_listed()
        with pytest.raises(OSError, match="in use"):
            LocalListener(name, LIMITS)
    assert not is_listed()
