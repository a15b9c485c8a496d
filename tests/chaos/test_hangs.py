"""Processes that stop, or never come back: a pause is survived, a hang ends at its time limit and says where."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time

import pytest
from chaos_engine import WAIT_S, TokenReader, make_config
from process_stat import is_alive
from process_table import wait_until
from scenarios import HERE, child_environment

from ringcore.engine_core import connection
from ringcore.engine_core.client import EngineCoreClient
from ringcore.errors import EngineDeadError, RingcoreError, RpcTimeoutError

STEP_TIMEOUT_S = 1.0
NOTICE_S = 30.0
CLOSE_S = 60.0


def start(model_folder, **options) -> EngineCoreClient:
    client = EngineCoreClient(make_config(model_folder, **options))
    client.wait_ready()
    return client


@pytest.mark.parametrize("role", ["engine", "worker 0", "worker 1"])
def test_a_process_that_is_stopped_for_a_second_goes_on(model_folder, role):
    with start(model_folder) as client:
        pid = client.ready.pids[role]
        tokens = TokenReader(client, "t", random.Random(3))
        tokens.add(20)
        tokens.take(WAIT_S)
        os.kill(pid, signal.SIGSTOP)
        try:
            call = client.collective_rpc
            with pytest.raises(RpcTimeoutError):
                call("echo", ["late"], timeout=0.1)
            time.sleep(0.9)
        finally:
            os.kill(pid, signal.SIGCONT)
        tokens.finish()
        assert call("echo", ["next"], timeout=WAIT_S) == [[0, "next"], [1, "next"]]


def test_a_front_end_that_is_stopped_for_a_second_goes_on(model_folder, tmp_path):
    command = [sys.executable, str(HERE / "serving_script.py"), model_folder, "2000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=child_environment(tmp_path)) as script:
        assert [script.stdout.readline(), script.stdout.readline()] == [b"starting\n", b"serving\n"]
        os.kill(script.pid, signal.SIGSTOP)
        time.sleep(1.0)
        os.kill(script.pid, signal.SIGCONT)
        assert script.stdout.read().endswith(b"done\n")
        assert script.wait(WAIT_S) == 0


@pytest.mark.parametrize(
    ("how", "rank", "says"),
    [
        ("python", 0, "in hang"),
        ("gil", 1, "in hang"),
        ("c call", 1, "in hang"),
        ("collective", 0, "in hang"),
    ],
)
def test_a_step_that_hangs_ends_at_its_limit_with_the_stacks(model_folder, capfd, how, rank, says):
    with start(model_folder, step_timeout_s=STEP_TIMEOUT_S, stall_warning_s=0.4) as client:
        pids = client.ready.pids
        client.collective_rpc("hang_in_next_step", [how, rank], timeout=WAIT_S)
        tokens = TokenReader(client, "t", random.Random(4))
        tokens.add(2)
        started = time.monotonic()
        # On a busy machine it may be dead before anybody looks.
        assert wait_until(lambda: client.health().state in ("stalled", "dead"), NOTICE_S)
        with pytest.raises(EngineDeadError, match="hung") as caught:
            tokens.finish()
        assert STEP_TIMEOUT_S * 0.9 < time.monotonic() - started < STEP_TIMEOUT_S + NOTICE_S
        assert caught.value.details["rank"] in (0, 1)
        assert rank in caught.value.details["hung_ranks"]
        assert wait_until(lambda: not any(map(is_alive, pids.values())), NOTICE_S)
    log = capfd.readouterr().err
    assert "step" in log
    assert log.count(f"rank {rank} (pid {pids[f'worker {rank}']})") >= 2, log  # a warning, and at the end
    assert says in log, log


def test_a_worker_stopped_for_ever_is_told_as_stopped(model_folder, capfd):
    with start(model_folder, step_timeout_s=STEP_TIMEOUT_S, stall_warning_s=0.4) as client:
        pids = client.ready.pids
        os.kill(pids["worker 0"], signal.SIGSTOP)
        tokens = TokenReader(client, "t", random.Random(4))
        tokens.add(2)
        with pytest.raises(EngineDeadError, match="hung") as caught:
            tokens.finish()
        assert caught.value.details["process"] == "worker 0"
        assert "stopped" in caught.value.message
        assert wait_until(lambda: not any(map(is_alive, pids.values())), NOTICE_S)
    log = capfd.readouterr().err
    assert "stopped" in log, log


def test_a_hang_is_healed_where_restarts_are_left(model_folder):
    # Long enough that no step of the new workers is taken for another hang.
    with start(model_folder, step_timeout_s=4 * STEP_TIMEOUT_S, max_worker_restarts=1) as client:
        client.collective_rpc("hang_in_next_step", ["gil", 1], timeout=WAIT_S)
        tokens = TokenReader(client, "t", random.Random(5))
        tokens.add(3)
        tokens.finish()
        health = client.health()
        assert (health.state, health.num_restarts) == ("ready", 1)
        assert "hung" in health.restart_cause


def test_an_engine_stopped_for_ever_stalls_and_can_be_closed(model_folder, is_long, monkeypatch):
    if not is_long:
        monkeypatch.setattr(connection, "_GRACEFUL_S", 1.0)
    client = start(model_folder)
    pids = client.ready.pids
    os.kill(pids["engine"], signal.SIGSTOP)
    try:
        started = time.monotonic()
        assert client.health(timeout=0.3).state == "stalled"
        with pytest.raises(RpcTimeoutError):
            client.collective_rpc("echo", ["x"], timeout=0.2)
        assert time.monotonic() - started < 0.5 + NOTICE_S
    finally:
        started = time.monotonic()
        client.close()
    assert time.monotonic() - started < CLOSE_S
    assert wait_until(lambda: not any(map(is_alive, pids.values())), NOTICE_S)
    with pytest.raises(RingcoreError):
        client.collective_rpc("echo", ["x"])
