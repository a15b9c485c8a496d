"""`AdminClient` over a real connection to an engine without workers."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq
from admin_peers import WAIT_S, EchoEngine, make_keys, open_endpoint, wait_until

from ringcore import AdminClient
from ringcore.config.admin_keys import public_key_of, read_client_keys
from ringcore.errors import (
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    PermissionDeniedError,
    RingcoreError,
    RpcTimeoutError,
    WorkerDiedError,
    WorkerError,
)
from ringcore.protocol.messages import EngineHealth, RpcCall
from ringcore.protocol.methods import RpcMethod
from ringcore.protocol.requests import EngineStats

HEALTH = EngineHealth("ready", step=3, num_running=1)
STATS = EngineStats(1, 2, 3, 4, 5, 6, 7)


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return make_keys(tmp_path_factory.mktemp("admin"))


@pytest.fixture
def engine(keys):
    with EchoEngine(keys, health=HEALTH, stats=msgspec.structs.asdict(STATS)) as made:
        yield made


@pytest.fixture
def client(engine, keys):
    with AdminClient(engine.address, keys) as made:
        yield made


# ---------------------------------------------------------------------------------------------------------------
# Calls.


def test_values_of_every_rank(client):
    assert client.collective_rpc("echo", ["a", 1], {"k": None}) == [[r, ["a", 1], {"k": None}] for r in range(2)]


def test_the_value_of_one_rank(client, engine):
    assert client.collective_rpc("echo", unique_reply_rank=1) == [1, [], {}]
    assert engine.calls[-1].unique_reply_rank == 1
    assert engine.calls[-1].is_callable is False


def test_arrays_travel_beside_the_message(client):
    small, large = np.arange(3), np.random.default_rng(0).random((100, 1000))
    values = client.collective_rpc("echo", [small, large])
    for rank, (got_rank, args, _) in enumerate(values):
        assert got_rank == rank
        np.testing.assert_array_equal(args[0], small)
        np.testing.assert_array_equal(args[1], large)


def test_health_and_stats_of_the_engine(client, engine):
    assert client.health() == HEALTH
    assert client.stats() == STATS
    assert [(call.target, call.method) for call in engine.calls] == [("engine", "health"), ("engine", "stats")]


def test_the_methods_that_can_be_called(client):
    methods = {(method.target, method.name): method for method in client.methods()}
    assert methods["workers", "fail"] == RpcMethod(
        "fail", "workers", "call", False, "() -> None", "Raises an error of rank 1."
    )
    assert methods["engine", "pause"].signature == "(mode: PauseMode = 'new') -> None"
    signature = "(level: Literal[0, 1, 2] = 1, mode: SleepMode = 'abort') -> MemoryReport"
    assert methods["engine", "sleep"].signature == signature
    assert methods["engine", "sleep"].summary.startswith("Releases device memory")
    assert ("workers", "shutdown") not in methods


def test_calls_of_the_engine_itself(client, engine):
    assert client.call_engine("pause", ["all"]) is None
    assert client.call_engine("health")["state"] == "ready"
    assert [(call.target, call.method) for call in engine.calls] == [("engine", "pause"), ("engine", "health")]


def test_a_key_without_the_scope_is_told_so(tmp_path):
    keys = make_keys(tmp_path, "read")
    with EchoEngine(keys) as engine, AdminClient(engine.address, keys) as client:
        with pytest.raises(PermissionDeniedError, match="method='echo': it needs the scope 'call', the key") as caught:
            client.collective_rpc("echo")
        remedy = 'write scope = "read call" into the metadata of '
        assert f"{remedy}{keys}/clients/client.key, and restart the engine" in caught.value.message
        with pytest.raises(PermissionDeniedError):
            client.call_engine("pause")
        assert client.collective_rpc("look", unique_reply_rank=0) == [0, [], {}]
        assert engine.calls[-1].method == "look"
        assert engine.endpoint.num_denied == 2


@pytest.mark.parametrize("name", ["shutdown", "_private"])
def test_what_no_client_may_call(client, engine, name):
    with pytest.raises(InvalidRequestError, match=r"^(method='shutdown': only the engine|no worker method '_private')"):
        client.collective_rpc(name)
    assert engine.calls == []


def test_an_error_of_a_worker_is_raised_as_itself(client):
    with pytest.raises(WorkerError, match="KeyError: 'x'") as caught:
        client.collective_rpc("fail")
    assert caught.value.details["rank"] == 1
    assert client.collective_rpc("echo", unique_reply_rank=0) == [0, [], {}]


def test_functions_are_not_sent(client, engine):
    with pytest.raises(InvalidRequestError, match="an admin client sends no functions"):
        client.collective_rpc(lambda worker: worker)
    assert engine.calls == []


def test_what_cannot_be_sent_is_said_before_anything_is(client, engine):
    with pytest.raises(InvalidRequestError, match="the arguments of 'echo' cannot be sent"):
        client.collective_rpc("echo", [object()])
    with pytest.raises(InvalidRequestError, match="above the limit of 67108864; send less per call"):
        client.collective_rpc("echo", [np.zeros(64 << 20, np.uint8)])
    assert engine.calls == []
    assert client.health() == HEALTH


@pytest.mark.parametrize("timeout", [-1, float("inf"), float("nan"), True, "1"])
def test_every_call_has_a_deadline(client, timeout):
    with pytest.raises(InvalidRequestError, match=r"^timeout=.*: give seconds, from 0 to 86400"):
        client.collective_rpc("echo", timeout=timeout)


def test_a_call_without_a_deadline_has_the_clients_own(client, monkeypatch):
    monkeypatch.setattr("ringcore.front_end.admin_client._TIMEOUT_S", 0.2)
    monkeypatch.setattr("ringcore.front_end.admin_client._REPLY_GRACE_S", 0.1)
    with pytest.raises(RpcTimeoutError, match=r"slow: no answer of the engine within 0\.2 s"):
        client.collective_rpc("slow", timeout=None)


# ---------------------------------------------------------------------------------------------------------------
# Deadlines, threads, the end.


def test_an_engine_that_does_not_answer_is_a_timeout_and_its_late_answer_is_nobodys(client, engine, monkeypatch):
    monkeypatch.setattr("ringcore.front_end.admin_client._REPLY_GRACE_S", 0.1)
    started = time.monotonic()
    with pytest.raises(RpcTimeoutError, match=r"slow: no answer of the engine within 0\.2 s") as caught:
        client.collective_rpc("slow", timeout=0.2)
    assert 0.2 <= time.monotonic() - started < WAIT_S
    assert caught.value.details["method"] == "slow"
    assert engine.calls[-1].timeout_s <= 0.2
    engine.release.set()
    assert client.collective_rpc("echo", ["mine"], unique_reply_rank=0) == [0, ["mine"], {}]


def test_threads_take_turns_and_each_gets_its_own(client):
    answers = {}

    def call(number: int) -> None:
        answers[number] = client.collective_rpc("echo", [number], unique_reply_rank=0)[1]

    threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert answers == {number: [number] for number in range(8)}


def pending(client, engine, method="slow"):
    """A call in a thread of its own, under way; what it ends with."""
    outcome: list[object] = []

    def call() -> None:
        try:
            outcome.append(client.collective_rpc(method, timeout=60))
        except RingcoreError as error:
            outcome.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    wait_until(lambda: any(made.method == method for made in engine.calls))
    return thread, outcome


def test_another_threads_call_does_not_outlast_the_deadline(client, engine):
    thread, outcome = pending(client, engine)
    with pytest.raises(RpcTimeoutError, match="other calls of this client were in flight"):
        client.collective_rpc("echo", timeout=0.1)
    engine.release.set()
    thread.join(WAIT_S)
    assert outcome == [[[0, [], {}], [1, [], {}]]]


def test_closing_ends_a_call_under_way(client, engine):
    thread, outcome = pending(client, engine)
    client.close()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="the admin client was closed"):
            client.collective_rpc("echo")
    assert isinstance(outcome[0], EngineDeadError)
    client.close()


@pytest.mark.parametrize("error", [EngineDeadError("worker 0 was killed", rank=0), WorkerDiedError("it died", rank=1)])
def test_the_engine_says_of_what_it_ends(keys, error):
    with EchoEngine(keys) as engine, AdminClient(engine.address, keys) as client:
        thread, outcome = pending(client, engine)
        engine.stop(error)
        thread.join(WAIT_S)
        assert type(outcome[0]) is type(error)
        assert (outcome[0].message, outcome[0].details) == (error.message, error.details)
        with pytest.raises(EngineDeadError, match="closed the connection: it has ended"):
            client.health()


ENGINE = """
import sys, time
sys.path.insert(0, sys.argv[2])
from admin_peers import open_endpoint
endpoint = open_endpoint(sys.argv[1])
print(endpoint.address, flush=True)
while endpoint.receive() is None:
    time.sleep(0.005)
print("called", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("while_calling", [True, False])
def test_a_killed_engine_ends_every_call(keys, while_calling):
    process = subprocess.Popen(
        [sys.executable, "-c", ENGINE, keys, str(Path(__file__).parents[1])], stdout=subprocess.PIPE, text=True
    )
    try:
        with AdminClient(process.stdout.readline().strip(), keys) as client:
            killer = threading.Thread(target=lambda: (process.stdout.readline(), process.kill()))
            if while_calling:
                killer.start()
            else:
                process.kill()
                process.wait(WAIT_S)
            started = time.monotonic()
            for _ in range(2):
                with pytest.raises(EngineDeadError, match="it has ended"):
                    client.collective_rpc("echo", timeout=60)
            assert time.monotonic() - started < WAIT_S
    finally:
        process.kill()
        process.wait(WAIT_S)
        process.stdout.close()


def test_nothing_is_left_of_a_closed_or_dropped_client(engine, keys):
    before = open_fds()
    for _ in range(5):
        with AdminClient(engine.address, keys) as client:
            client.health()
        AdminClient(engine.address, keys).health()
    wait_until(lambda: open_fds() <= before)


def open_fds() -> int:
    """Descriptors of this process that are not connections: the engine's end of those is here too, for a while."""
    return sum("eventfd" in readlink(fd) or "eventpoll" in readlink(fd) for fd in Path("/proc/self/fd").iterdir())


def readlink(fd: Path) -> str:
    try:
        return str(fd.readlink())
    except OSError:
        return ""


# ---------------------------------------------------------------------------------------------------------------
# Connecting.


def test_keys_may_be_given_one_by_one(engine, keys):
    own = read_client_keys(keys)
    with AdminClient(engine.address, server_key=own.server.decode(), client_secret_key=own.secret) as client:
        assert client.health() == HEALTH


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"server_key": "x" * 40},
        {"client_secret_key": "x" * 40},
        {"keys": "/tmp", "server_key": "x" * 40, "client_secret_key": "x" * 40},
    ],
)
def test_keys_are_one_directory_or_two_keys(given):
    with pytest.raises(ConfigError, match="give the directory of 'ringcore keys', or both"):
        AdminClient("tcp://127.0.0.1:1", **given)


@pytest.mark.parametrize("bad", ["short", "x" * 41, "~" * 40, b"\xff" * 40, "#" * 40])
def test_a_key_that_is_none_is_refused_and_not_shown(bad, keys):
    with pytest.raises(ConfigError, match="no CurveZMQ key; give its 40 characters") as caught:
        AdminClient("tcp://127.0.0.1:1", server_key=read_client_keys(keys).server, client_secret_key=bad)
    assert str(bad) not in str(caught.value)


def test_an_unknown_key_is_refused(engine, keys):
    secret = zmq.curve_keypair()[1]
    with pytest.raises(ConfigError, match="the engine does not know this key; put its public key into clients/"):
        AdminClient(engine.address, server_key=read_client_keys(keys).server, client_secret_key=secret)
    assert engine.endpoint.num_rejected == 1
    assert engine.calls == []


def test_a_wrong_server_key(engine, keys):
    own = read_client_keys(keys)
    with pytest.raises(EngineDeadError, match="the server key may be that of another engine"):
        AdminClient(engine.address, server_key=public_key_of(own.secret), client_secret_key=own.secret)


def test_nobody_listens(keys):
    free = open_endpoint(keys)
    free.close()
    with pytest.raises(EngineDeadError, match="nothing listens at this address"):
        AdminClient(free.address, keys)


def test_somebody_listens_who_never_answers(keys):
    context = zmq.Context()
    silent = context.socket(zmq.STREAM)  # takes the connection, says nothing
    port = silent.bind_to_random_port("tcp://127.0.0.1")
    try:
        with pytest.raises(RpcTimeoutError, match=r"no engine answers at tcp://127\.0\.0\.1"):
            AdminClient(f"tcp://127.0.0.1:{port}", keys, connect_timeout=0.3)
    finally:
        context.destroy(linger=0)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "tcp://*:5600", "ipc:///tmp/x", "127.0.0.1:5600", None])
def test_an_endpoint_that_nobody_can_connect_to(keys, address):
    with pytest.raises(ConfigError, match=r"^endpoint=.*: give "):
        AdminClient(address, keys)


def test_a_busy_engine_still_lets_its_clients_in(keys):
    endpoint = open_endpoint(keys)  # no thread reads from it
    try:
        with AdminClient(endpoint.address, keys) as client:
            with pytest.raises(RpcTimeoutError, match="health: no answer"):
                client.health(timeout=0.1)
            assert isinstance(endpoint.receive().call, RpcCall)
    finally:
        endpoint.close()
