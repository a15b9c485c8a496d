"""An engine process that is administrated from outside while it serves its own client."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import psutil
import pytest
from admin_peers import ANY_PORT, SILENCE_S, WAIT_S, RawPeer, make_keys, open_endpoint, wait_until
from fake_engine import expected, make_model_folder

from ringcore import AdminClient, EngineConfig, SamplingParams
from ringcore.errors import (
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    RingcoreError,
    WorkerDiedError,
    WorkerError,
)
from ringcore.executor.value_codec import encode_value
from ringcore.front_end.client import EngineCoreClient
from ringcore.protocol.codec import encoder
from ringcore.protocol.messages import RpcCall
from ringcore.protocol.requests import EngineCoreRequest


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return make_keys(tmp_path_factory.mktemp("admin"))


def start(folder, keys, **options) -> EngineCoreClient:
    options = {"admin_endpoint": ANY_PORT, "admin_keys": keys, "executor": "fake_engine:FakeMultiproc"} | options
    return EngineCoreClient(EngineConfig.from_options(model=folder, load_format="dummy", max_model_len=64, **options))


@pytest.fixture(scope="module")
def engine(folder, keys):
    with start(folder, keys, tensor_parallel_size=2, allow_callables=True, enable_sleep_mode=True) as client:
        client.wait_ready()
        yield client


@pytest.fixture
def admin(engine, keys):
    with AdminClient(engine.ready.admin_endpoint, keys) as client:
        yield client


def in_thread(call):
    """A call in a thread of its own, and what it ends with."""
    outcome: list[object] = []

    def run() -> None:
        try:
            outcome.append(call())
        except RingcoreError as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, outcome


def test_methods_of_every_worker(admin):
    assert admin.collective_rpc("echo", ["a"], {"times": 2}) == ["0:aa", "1:aa"]
    assert admin.collective_rpc("echo", ["b"], unique_reply_rank=1) == "1:b"
    large = np.arange(100_000, dtype=np.int32)
    for value in admin.collective_rpc("doubled", [large]):
        np.testing.assert_array_equal(value, large * 2)


def test_errors_leave_the_engine_as_it_is(admin, engine):
    with pytest.raises(WorkerError, match="rank 1"):
        admin.collective_rpc("fail_on", [[1]])
    with pytest.raises(InvalidRequestError, match="no worker method 'ecko' is declared with @rpc"):
        admin.collective_rpc("ecko")
    with pytest.raises(InvalidRequestError, match="unique_reply_rank=2"):
        admin.collective_rpc("echo", ["x"], unique_reply_rank=2)
    with pytest.raises(RingcoreError, match="above the limit"):
        admin.collective_rpc("zeros", [40 << 20])  # 40 MiB of each rank
    assert admin.collective_rpc("echo", ["still"], unique_reply_rank=0) == "0:still"
    assert engine.collective_rpc("echo", ["here"]) == ["0:here", "1:here"]


def test_health_and_stats(admin):
    assert admin.health().state == "ready"
    assert [rank.rank for rank in admin.health().ranks] == [0, 1]
    assert admin.stats().num_running == 0


def test_sleep_and_wake_up(admin, engine):
    assert [rank["copied_bytes"] for rank in admin.collective_rpc("sleep", kwargs={"level": 1})] == [10.0, 11.0]
    assert admin.health().state == "sleeping"
    assert admin.health().memory == {"weights": "offloaded", "kv_cache": "discarded"}
    assert engine.is_sleeping()
    assert admin.stats().is_sleeping
    with pytest.raises(InvalidRequestError, match="only the engine itself calls it"):
        admin.collective_rpc("commit_memory")
    assert admin.collective_rpc("wake_up", unique_reply_rank=1)["residue_bytes"] == 5.0
    assert admin.health().state == "ready"


def test_the_engine_serves_its_client_meanwhile(admin, engine):
    engine.add_requests([EngineCoreRequest("a", [5, 6], SamplingParams(max_tokens=40), arrival_s=0.0)])
    tokens: list[int] = []
    while len(tokens) < 40:
        tokens += [t for o in engine.get_outputs(timeout=WAIT_S).outputs for t in o.new_token_ids]
        assert admin.collective_rpc("echo", ["x"], unique_reply_rank=0) == "0:x"
    assert tokens == expected([5, 6], 40)


def test_many_clients_at_once(engine, keys):
    def work(number: int) -> list[str]:
        with AdminClient(engine.ready.admin_endpoint, keys) as client:
            return [client.collective_rpc("echo", [f"{number}.{i}"], unique_reply_rank=0) for i in range(20)]

    running = [in_thread(lambda n=n: work(n)) for n in range(8)]
    for number, (thread, outcome) in enumerate(running):
        thread.join(WAIT_S)
        assert outcome == [[f"0:{number}.{i}" for i in range(20)]]


def test_a_burst_of_calls_is_not_slept_through(engine, keys):
    with RawPeer(engine.ready.admin_endpoint, keys) as peer:
        for call_id in range(60):
            peer.call(RpcCall(call_id, "engine", "stats", timeout_s=60.0))
        assert [peer.receive()[0].call_id for _ in range(60)] == list(range(60))


def test_functions_are_refused_though_the_engine_takes_them_from_its_own_client(engine, keys):
    call = RpcCall(1, "workers", "f", is_callable=True, timeout_s=60.0)
    with RawPeer(engine.ready.admin_endpoint, keys) as peer:
        peer.send(encoder().encode(call), encode_value([b"\x80\x05.", [], {}])[0])
        result, _ = peer.receive()
        assert "an admin client may not send functions" in result.error.message
        peer.send(encoder().encode(RpcCall(2, "workers", "f", timeout_s=60.0)), encode_value([b"\x80\x05.", [], {}])[0])
        assert peer.receive(SILENCE_S) is None
    assert engine.collective_rpc("echo", ["x"], unique_reply_rank=0) == "0:x"


@pytest.mark.parametrize(
    "parts",
    [
        [encode_value(["echo", [], {}])[0], b"a buffer that nobody names"],
        [encode_value(["echo", "no list", {}])[0]],
        [encode_value(["echo", [], {1: 2}])[0]],
        [encode_value(["echo", [1, 2, 3, 4], {}])[0]],
    ],
)
def test_arguments_that_no_worker_can_read_are_that_calls_error(engine, keys, parts):
    with RawPeer(engine.ready.admin_endpoint, keys) as peer:
        peer.send(encoder().encode(RpcCall(1, "workers", "echo", timeout_s=60.0)), *parts)
        result, _ = peer.receive()
        assert result.error is not None
        peer.call(RpcCall(2, "workers", "echo", timeout_s=60.0), "x")
        assert peer.receive()[0].error is None


def test_a_flood_of_garbage_and_its_neighbour(engine, admin, keys):
    with RawPeer(engine.ready.admin_endpoint, keys) as vandal:
        for _ in range(2000):
            vandal.send(b"garbage", b"more of it")
        assert admin.collective_rpc("echo", ["x"], unique_reply_rank=0) == "0:x"


def test_an_idle_engine_does_nothing(engine, admin):
    admin.health()
    process = psutil.Process(engine.ready.pids["engine"])
    before = sum(process.cpu_times()[:2])
    time.sleep(1.0)
    assert sum(process.cpu_times()[:2]) - before < 0.3


def test_an_admin_client_that_is_killed_mid_call_is_not_missed(engine, admin, keys):
    with RawPeer(engine.ready.admin_endpoint, keys) as leaver:
        leaver.call(RpcCall(1, "workers", "nap", timeout_s=60.0), 0.3)
        time.sleep(0.1)
    assert admin.collective_rpc("echo", ["x"], unique_reply_rank=0) == "0:x"


# ---------------------------------------------------------------------------------------------------------------
# Start, death, end.


def test_a_port_in_use_reaches_the_caller(folder, keys):
    taken = open_endpoint(keys)
    try:
        with pytest.raises(ConfigError, match=r"^admin_endpoint=.*the port is in use"):
            start(folder, keys, admin_endpoint=taken.address).wait_ready()
    finally:
        taken.close()


def test_there_is_none_unless_asked_for(folder):
    options = {"executor": "fake_engine:FakeMultiproc", "max_model_len": 64}
    with EngineCoreClient(EngineConfig.from_options(model=folder, load_format="dummy", **options)) as client:
        assert client.ready.admin_endpoint is None
        assert psutil.Process(client.ready.pids["engine"]).net_connections("tcp") == []


def test_a_worker_that_dies_ends_the_call_and_the_engine(folder, keys):
    with start(folder, keys) as engine, AdminClient(engine.ready.admin_endpoint, keys) as admin:
        with pytest.raises(EngineDeadError, match="SIGKILL") as caught:
            admin.collective_rpc("die")
        assert caught.value.details["rank"] == 0
        with pytest.raises(EngineDeadError):
            admin.health()
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            engine.collective_rpc("echo", ["x"])


def test_an_engine_that_heals_keeps_its_admin_clients(folder, keys):
    with start(folder, keys, max_worker_restarts=2) as engine, AdminClient(engine.ready.admin_endpoint, keys) as admin:
        address = engine.ready.admin_endpoint
        for restarts in (1, 2):
            with pytest.raises(WorkerDiedError, match="SIGKILL"):
                admin.collective_rpc("die")
            assert admin.collective_rpc("echo", ["x"]) == ["0:x"]
            assert admin.health(timeout=WAIT_S).num_restarts == restarts
        wait_until(lambda: engine.health().num_restarts == 2)
        assert engine.ready.admin_endpoint == address


SAYS = {
    "close": "the engine was closed",
    "SIGTERM": "asked to end by SIGTERM",
    "SIGKILL": "closed the connection: it has ended",
}


@pytest.mark.parametrize("how", SAYS)
def test_the_end_of_the_engine_ends_a_call_under_way(folder, keys, how):
    with start(folder, keys) as engine, AdminClient(engine.ready.admin_endpoint, keys) as admin:
        thread, outcome = in_thread(lambda: admin.collective_rpc("nap", [30.0], timeout=60.0))
        with AdminClient(engine.ready.admin_endpoint, keys) as other:
            wait_until(lambda: other.health().ranks[0].method == "nap")
        if how == "close":
            in_thread(engine.close)
        else:
            os.kill(engine.ready.pids["engine"], getattr(signal, how))
        thread.join(WAIT_S)
        assert isinstance(outcome[0], EngineDeadError)
        assert SAYS[how] in outcome[0].message
