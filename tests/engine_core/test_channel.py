"""The socket between client and engine: who may speak, what is dropped, what is left behind."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import zmq

from ringcore.engine_core import channel as channel_module
from ringcore.engine_core.channel import ClientChannel, EngineChannel
from ringcore.errors import EngineDeadError, InvalidRequestError
from ringcore.protocol import AbortRequests, AddRequests, EngineDead, RpcCall, RpcResult, WireError, encoder


@pytest.fixture
def pair():
    client = ClientChannel()
    engine = EngineChannel(client.endpoint, client.nonce)
    yield client, engine
    engine.close()
    client.close()


def receive(channel, socket):
    message = channel.receive()
    while message is None:
        assert socket.poll(5000), "no message came"
        message = channel.receive()
    return message


def test_messages_both_ways_in_order(pair):
    client, engine = pair
    engine.wait_for_client(5)
    for i in range(50):
        client.send(AbortRequests([str(i)]))
    assert [receive(engine, engine.socket).request_ids for _ in range(50)] == [[str(i)] for i in range(50)]
    for i in range(50):
        engine.send(RpcResult(i, value={"n": i}))
    assert [receive(client, client.receiver).call_id for _ in range(50)] == list(range(50))
    assert engine.receive() is None
    assert client.receive() is None


def test_what_is_sent_before_the_engine_is_there_arrives(pair):
    client, engine = pair
    client.send(AbortRequests(["early"]))
    engine.wait_for_client(5)
    client.send(AbortRequests(["later"]))
    assert [receive(engine, engine.socket).request_ids for _ in range(2)] == [["early"], ["later"]]


def test_once_connected_nothing_has_a_name(pair):
    client, engine = pair
    assert stat.S_IMODE(os.stat(client.directory).st_mode) == 0o700
    assert Path(client.directory, "engine").exists()
    engine.wait_for_client(5)
    assert not os.path.exists(client.directory)
    client.send(AbortRequests(["a"]))
    assert receive(engine, engine.socket).request_ids == ["a"]


def test_what_is_no_message_is_counted_and_dropped(pair):
    client, engine = pair
    engine.wait_for_client(5)
    good = encoder().encode(AbortRequests(["good"]))
    unknown_field = good.replace(b"request_ids", b"request_idz")
    for frame in (
        b"\xff\xff",
        b"",
        b"\x80",
        unknown_field,
        good[:-1],
        encoder().encode(EngineDead(WireError("X", "y"))),
    ):
        client._sender.send(frame)
    client.send(AbortRequests(["good"]))
    assert receive(engine, engine.socket).request_ids == ["good"]
    assert engine.num_dropped == 6


def test_a_stranger_is_not_heard(pair):
    client, engine = pair
    stranger = client._context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.LINGER, 0)
    stranger.connect(client.endpoint)
    stranger.send(b"")
    engine.wait_for_client(5)
    stranger.send(encoder().encode(AbortRequests(["evil"])))
    stranger.send(encoder().encode(AbortRequests(["evil"])))
    while engine.num_dropped < 3:
        assert engine.socket.poll(5000)
        assert engine.receive() is None
    client.send(AbortRequests(["good"]))
    assert receive(engine, engine.socket).request_ids == ["good"]
    stranger.close()


def test_no_client_is_an_error_at_the_deadline(tmp_path):
    engine = EngineChannel(f"ipc://{tmp_path}/engine", b"0" * 16)
    with pytest.raises(EngineDeadError, match=r"within 0\.05 s"):
        engine.wait_for_client(0.05)
    engine.close()


@pytest.mark.parametrize("value", [object(), 2**70, "\ud800"])
def test_what_cannot_be_encoded_is_the_callers_error(pair, value):
    client, _ = pair
    with pytest.raises(InvalidRequestError, match="cannot be sent"):
        client.send(RpcCall(1, "workers", "m", [value]))


def test_too_long_a_message_is_refused_before_it_is_sent(pair, monkeypatch):
    client, engine = pair
    engine.wait_for_client(5)
    monkeypatch.setattr(channel_module, "MAX_MESSAGE_BYTES", 1000)
    with pytest.raises(InvalidRequestError, match="above the limit of 1000"):
        client.send(AbortRequests(["x" * 1000]))
    with pytest.raises(ValueError, match="above the limit of 1000"):
        engine.send(RpcResult(1, value="x" * 1000))
    client.send(AddRequests([]))
    assert receive(engine, engine.socket) == AddRequests([])


def test_an_unreadable_message_of_the_engine_is_its_end(pair):
    client, engine = pair
    engine.wait_for_client(5)
    engine.socket.send_multipart([b"rx" + client.nonce, b"\xff"])
    assert client.receiver.poll(5000)
    with pytest.raises(EngineDeadError, match="unreadable"):
        client.receive()


def test_a_long_temporary_directory_still_has_room_for_a_socket(tmp_path, monkeypatch):
    deep = tmp_path / ("d" * 120)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    client = ClientChannel()
    engine = EngineChannel(client.endpoint, client.nonce)
    engine.wait_for_client(5)
    client.close()
    engine.close()
    assert list(deep.iterdir()) == []


def test_closing_twice_leaves_nothing(pair):
    client, _ = pair
    client.close()
    client.close()
    assert not os.path.exists(client.directory)
