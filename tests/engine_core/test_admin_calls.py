"""What both ways in to the admin endpoint promise: TCP with keys, and the private socket."""

from __future__ import annotations

from functools import partial

import pytest
from admin_peers import SILENCE_S, LocalPeer, RawPeer, echo, local_name, open_endpoint, receive

from ringcore.errors import EngineDeadError
from ringcore.executor.value_codec import encode_request
from ringcore.protocol.messages import RpcResult
from ringcore.protocol.wire_errors import wire_error


@pytest.fixture(params=["tcp", "private socket"])
def reached(request, keys):
    """The endpoint, and what makes a client of it."""
    name = local_name()
    endpoint = open_endpoint(keys) if request.param == "tcp" else open_endpoint(None, name=name)
    yield endpoint, partial(RawPeer, endpoint.address, keys) if request.param == "tcp" else partial(LocalPeer, name)
    endpoint.close()


def test_a_call_arrives_with_its_buffers_and_the_answer_goes_back(reached):
    endpoint, connect = reached
    with connect() as peer, connect() as other:
        call = echo(7, unique_reply_rank=1)
        peer.call(call, "x", 3)
        got = receive(endpoint)
        assert got.call == call
        assert [bytes(part) for part in got.parts] == encode_request("echo", ["x", 3], None)
        assert all(len(part) == part.nbytes for part in got.parts)
        other.call(echo(7), "of another client, with the same id")
        assert receive(endpoint).caller != got.caller
        endpoint.send(got.caller, RpcResult(7, [1, 2]), [b"a", bytearray(b"b"), memoryview(b"c")])
        assert peer.receive() == (RpcResult(7, [1, 2]), [b"a", b"b", b"c"])
        assert other.receive(SILENCE_S) is None


def test_everybody_who_waits_gets_the_error_at_the_end(reached):
    endpoint, connect = reached
    with connect() as peer:
        for call_id in (1, 2):
            peer.call(echo(call_id))
            receive(endpoint)
        endpoint.fail(wire_error(EngineDeadError("worker 0 ended", process="worker 0", rank=0)))
        endpoint.close(5.0)
        for call_id in (1, 2):
            result, _ = peer.receive()
            assert (result.call_id, result.error.type, result.error.details["rank"]) == (call_id, "EngineDeadError", 0)
        endpoint.close()  # again
