"""Calls that cannot be served, each in its own way: that call's typed error, and hundreds of calls after it succeed."""

from __future__ import annotations

import msgspec
import pytest
from chaos_engine import make_config
from chaos_worker import ChaosMultiproc

from ringcore.errors import InvalidRequestError, RingcoreError, WorkerError
from ringcore.executor.rpc_call import EncodedCall
from ringcore.executor.value_codec import encode_request
from ringcore.front_end.client import EngineCoreClient

BOUND_S = 60.0
NUM_AFTER = 200

# Request bodies that are none: what a worker gets in place of [method, args, kwargs].
BODIES = {
    "not msgpack": b"\xc1\xc1\xc1",
    "empty": b"",
    "truncated": bytes(encode_request("echo", ["a" * 100], None)[0])[:-20],
    "one bit wrong": bytes(encode_request("echo", ["abc"], None)[0][:-4]) + b"\xff\xff\xff\xff",
    "wrong type": msgspec.msgpack.encode({"method": "echo"}),
    "wrong types inside": msgspec.msgpack.encode(["echo", {}, []]),
    "method is a number": msgspec.msgpack.encode([7, [], {}]),
    "another method than announced": bytes(encode_request("stats", [], None)[0]),
    "nested too deep": b"\x91" * 100_000,
    "a list of 4 billion": b"\xdd\xff\xff\xff\xff",
    "bytes of 4 GB": b"\xc6\xff\xff\xff\xff" + bytes(100),
    "an unknown extension": b"\xd4\x55\x00",
    "an array of a terabyte": b"\x93\xa4echo\x91\xc7\x0f\x01\x93\xa5uint8\x91\xcf" + b"\0\0\1\0\0\0\0\0" + b"\0\x80",
}


@pytest.fixture(scope="module")
def executor(model_folder):
    executor = ChaosMultiproc(make_config(model_folder))
    executor.start()
    yield executor
    executor.shutdown()


def check_unharmed(executor, num_calls: int = NUM_AFTER) -> None:
    futures = [executor.submit_rpc("echo", [i]) for i in range(num_calls)]
    for i, future in enumerate(futures):
        assert future.result(BOUND_S) == [[0, i], [1, i]]


@pytest.mark.parametrize("name", BODIES)
def test_a_request_that_cannot_be_read_is_its_own_error(executor, name):
    call = EncodedCall("echo", [BODIES[name]], timeout_s=BOUND_S)
    with pytest.raises(RingcoreError) as caught:
        executor.forward(call).result(BOUND_S)
    assert set(caught.value.failures) == {0, 1}
    check_unharmed(executor)


def test_buffers_that_do_not_belong_are_the_calls_error(executor):
    good = [bytes(part) for part in encode_request("echo", ["x"], None)]
    for parts in ([*good, b"one too many"], [good[0], *[b""] * 40]):
        with pytest.raises(RingcoreError):
            executor.forward(EncodedCall("echo", parts, timeout_s=BOUND_S)).result(BOUND_S)
    check_unharmed(executor)


@pytest.mark.parametrize(
    ("method", "args", "error"),
    [
        ("no_such_method", [], InvalidRequestError),
        ("_private", [], InvalidRequestError),
        ("__init__", [], InvalidRequestError),
        ("hang_in_next_step", [1, 2, 3], InvalidRequestError),
        ("hang_in_next_step", ["", "not an int"], InvalidRequestError),
        ("fail", [], WorkerError),
    ],
)
def test_a_call_that_is_wrong_or_raises_is_its_own_error(executor, method, args, error):
    with pytest.raises(error) as caught:
        executor.collective_rpc(method, args, timeout=BOUND_S)
    assert set(caught.value.failures) == {0, 1}
    check_unharmed(executor)


@pytest.mark.parametrize(
    "acts", [("raise", "ok"), ("ok", "raise"), ("unencodable", "ok"), ("ok", "unencodable"), ("raise", "unencodable")]
)
def test_a_value_or_error_that_cannot_be_sent_is_its_own_error(executor, acts):
    dice = [{"act": act, "sleep_s": 0.0} for act in acts]
    before = executor.submit_rpc("echo", ["before"])
    bad = executor.submit_rpc("roll", [1, dice])
    after = executor.submit_rpc("echo", ["after"])
    assert after.result(BOUND_S) == [[0, "after"], [1, "after"]]
    with pytest.raises(WorkerError) as caught:
        bad.result(BOUND_S)
    assert set(caught.value.failures) == {rank for rank, act in enumerate(acts) if act != "ok"}
    assert before.result(BOUND_S) == [[0, "before"], [1, "before"]]
    check_unharmed(executor)


def test_poison_through_the_engine_harms_no_neighbour(model_folder):
    with EngineCoreClient(make_config(model_folder)) as client:
        for _ in range(5):
            with pytest.raises(InvalidRequestError):
                client.collective_rpc("no_such_method", timeout=BOUND_S)
            with pytest.raises(WorkerError):
                client.collective_rpc("roll", [1, [{"act": "unencodable", "sleep_s": 0.0}] * 2], timeout=BOUND_S)
            assert client.collective_rpc("echo", ["x"], timeout=BOUND_S) == [[0, "x"], [1, "x"]]
