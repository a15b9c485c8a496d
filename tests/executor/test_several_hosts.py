"""Workers on several hosts: the same calls, steps, errors and ends, near and far."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import fake_worker
import numpy as np
import pytest
from fake_worker import step
from far_agent import Agent, with_path
from far_hosts import Hosts, started
from network_host import network_host
from process_checks import BOUND_S, is_gone

from ringcore.config.admin_keys import create_keys
from ringcore.errors import EngineDeadError, ModelLoadError, WorkerError
from ringcore.executor.far import port
from ringcore.executor.far.several_hosts import free_port


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with started(tmp_path_factory.mktemp("hosts"), ["b", "localhost", "b"]) as made:
        yield made


def test_values_are_in_rank_order(hosts):
    executor, num_ranks = hosts.executor, len(hosts.executor.config.parallel.layout.hosts)
    for _ in range(20):
        assert [value["rank"] for value in executor.collective_rpc("who")] == list(range(num_ranks))
    assert executor.collective_rpc("nap", [0.03], {"on_rank": 0}) == list(range(num_ranks))
    assert executor.collective_rpc("add", [1], {"y": 2}, unique_reply_rank=num_ranks - 1) == 3
    pids = [value["pid"] for value in executor.collective_rpc("who")]
    assert list(executor.pids().values()) == pids


@pytest.mark.parametrize("size", [0, 1, 9 << 20])
def test_arguments_and_values_of_any_size(hosts, size):
    num_ranks = len(hosts.executor.pids())
    assert hosts.executor.collective_rpc("sizes", [bytes(size)]) == [size] * num_ranks
    assert hosts.executor.collective_rpc("zeros", [size]) == [bytes(size)] * num_ranks
    array = np.arange(1000.0)
    assert all((one == array).all() for one in hosts.executor.collective_rpc("echo", [array]))


def test_steps_and_calls_in_flight_keep_their_order(hosts):
    executor = hosts.executor
    before = executor.collective_rpc("count", [0])
    futures = [executor.submit_rpc("count") for _ in range(100)]
    steps = [executor.execute_model(step(i)) for i in range(30)]
    assert [future.result(BOUND_S) for future in futures] == [[n + i for n in before] for i in range(1, 101)]
    assert [future.result(BOUND_S).step for future in steps] == list(range(30))


def test_read_only_calls_overtake(hosts, tmp_path):
    executor, gate = hosts.executor, tmp_path / "gate"
    num_ranks = len(executor.pids())
    slow = executor.submit_rpc("wait_for_file", [str(gate), num_ranks - 1])
    assert [one["rank"] for one in executor.collective_rpc("peek")] == list(range(num_ranks))
    assert not slow.done()
    deadline = time.monotonic() + BOUND_S  # a slow rank is seen to be slow, and its host is not lost
    while executor.health()[num_ranks - 1].method != "wait_for_file":
        assert time.monotonic() < deadline
    assert executor.health()[num_ranks - 1].heartbeat_age_s < BOUND_S
    assert "wait_for_file" in executor.diagnose()
    gate.touch()
    slow.result(BOUND_S)


def test_errors_name_their_rank(hosts):
    executor = hosts.executor
    with pytest.raises(WorkerError) as caught:
        executor.collective_rpc("fail", ["x", 1])
    assert caught.value.details["rank"] == 1
    with pytest.raises(WorkerError) as caught:
        executor.execute_model(step(1, fake_worker.RAISES)).result(BOUND_S)
    assert caught.value.details["rank"] == 0
    assert executor.collective_rpc("echo", [2]) == [2] * len(executor.pids())


def test_a_far_workers_death_names_its_host_and_it_is_replaced(tmp_path):
    with started(tmp_path, ["localhost", "b"]) as hosts:
        executor = hosts.executor
        began = time.monotonic()
        with pytest.raises(EngineDeadError, match=r"'worker 1 on b'.*SIGKILL") as caught:
            executor.execute_model(step(1, fake_worker.KILLS_RANK_1_RAISES_ON_0)).result(BOUND_S)
        assert time.monotonic() - began < 0.5 * BOUND_S
        details = caught.value.details
        assert (details["rank"], details["signal"], details["host"]) == (1, "SIGKILL", "b")
        executor.restart()
        assert executor.execute_model(step(2)).result(BOUND_S).step == 2
        assert executor.collective_rpc("nap", [0.0]) == [0, 1]
        pids = executor.pids()
        executor.shutdown()
        assert hosts.agents["b"].wait() == (0, "")  # the engine has ended regularly
        assert all(map(is_gone, pids.values()))


def test_a_dead_agent_ends_the_calls_and_another_may_take_its_place(tmp_path):
    with started(tmp_path, ["localhost", "b"]) as hosts:
        executor = hosts.executor
        slow = executor.submit_rpc("nap", [600.0])
        old_pids = executor.pids()
        hosts.agents["b"].kill()
        began = time.monotonic()
        with pytest.raises(EngineDeadError, match=r"the host 'b' .* with rank 1 is lost") as caught:
            slow.result(BOUND_S)
        assert time.monotonic() - began < 0.5 * BOUND_S
        assert caught.value.details["host"] == "b"
        hosts.join("b")
        executor.restart()
        assert executor.collective_rpc("nap", [0.0]) == [0, 1]
        assert all(map(is_gone, old_pids.values()))


ENGINE = """
import sys, time
from far_hosts import executor_of
executor = executor_of(["b"], *sys.argv[1:])
executor.start()
print(*executor.pids().values(), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("end", [signal.SIGSTOP, signal.SIGKILL])
def test_an_engine_that_is_gone_frees_the_host(tmp_path, end):
    """Its agent kills the workers: the engine has died, or its heartbeats have stopped."""
    keys = create_keys(tmp_path / "keys")
    endpoint = f"tcp://127.0.0.1:{free_port('127.0.0.1')}"
    agent = Agent("b", endpoint, keys, ["--patience", "1"])
    arguments = [sys.executable, "-c", ENGINE, endpoint, str(keys)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=with_path(Path(__file__).parent)) as engine:
        try:
            pids = list(map(int, engine.stdout.readline().split()))
            engine.send_signal(end)
            began = time.monotonic()
            while not all(map(is_gone, pids)):
                assert time.monotonic() - began < BOUND_S
                time.sleep(0.02)
            code, said = agent.wait()
            assert (code, "no engine at" in said) == (1, True), said
        finally:
            engine.kill()
            agent.kill()


def test_who_may_not_join_is_told_why(hosts, tmp_path):
    refused = {
        "no rank is on a host 'c'": hosts.join("c"),
        "handshake failed": hosts.join("strange", keys=create_keys(tmp_path / "other")),
    }
    for reason, agent in refused.items():
        while agent.is_alive():
            hosts.executor.poll_replies()  # as an engine does whenever a frame arrives
            time.sleep(0.02)
        code, said = agent.wait()
        assert (code, reason in said) == (2, True), said
    hosts.executor.check()


def test_what_stops_a_far_worker_from_starting_is_raised(tmp_path):
    made = Hosts(tmp_path, ["b"], trouble="fail in init")
    try:
        made.join("b")
        with pytest.raises(ModelLoadError):
            made.executor.start()
    finally:
        made.close()


def test_a_stopped_worker_is_no_dead_host(hosts):
    executor = hosts.executor
    pid = executor.collective_rpc("who")[2]["pid"]
    os.kill(pid, signal.SIGSTOP)
    call = executor.submit_rpc("nap", [0.0])
    deadline = time.monotonic() + BOUND_S
    while executor.health()[2].process_state != "stopped":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(2.0)  # longer than a dead host takes to be noticed
    assert not call.done()
    executor.check()
    os.kill(pid, signal.SIGCONT)
    assert call.result(BOUND_S) == [0, 1, 2]


def test_a_host_that_is_cut_off_is_named_in_two_seconds_and_may_come_back(tmp_path):
    with network_host() as wire:
        made = Hosts(tmp_path, ["localhost", "b"], address=wire.near)
        try:
            made.join("b", under=wire.enter)
            made.executor.start()
            assert made.executor.collective_rpc("nap", [0.0]) == [0, 1]
            old_pids = made.executor.pids()
            slow = made.executor.submit_rpc("nap", [600.0])
            wire.cut()
            began = time.monotonic()
            with pytest.raises(EngineDeadError, match=r"the host 'b' \(198.18.77.2\) with rank 1 is lost") as caught:
                slow.result(BOUND_S)
            assert port._HEARTBEAT_MS + port._HEARTBEAT_TIMEOUT_MS < 2000
            assert time.monotonic() - began < 0.5 * BOUND_S  # of which a busy machine may take the rest
            assert caught.value.details["host"] == "b"
            wire.mend()
            made.executor.restart()  # the same agent has joined again
            assert made.executor.collective_rpc("nap", [0.0]) == [0, 1]
            assert all(map(is_gone, old_pids.values()))
        finally:
            made.close()


def test_a_slow_wire_is_no_dead_host(tmp_path):
    """A message takes longer than heartbeats may; they go between its pieces."""
    with network_host() as wire:
        made = Hosts(tmp_path, ["b"], address=wire.near)
        try:
            made.join("b", under=wire.enter)
            made.executor.start()
            wire.slow_down(80)
            began = time.monotonic()
            assert made.executor.collective_rpc("sizes", [bytes(30 << 20)]) == [30 << 20]
            assert time.monotonic() - began > 2.0
        finally:
            made.close()
