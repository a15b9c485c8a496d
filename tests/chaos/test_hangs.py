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
from chaos_worker import GatedMultiproc, HangingMultiproc
from fake_engine import make_model_folder
from process_stat import is_alive
from process_table import wait_until
from scenarios import HERE, child_environment

from ringcore.errors import EngineDeadError, RingcoreError, RpcTimeoutError
from ringcore.front_end import connection
from ringcore.front_end.client import EngineCoreClient

STEP_TIMEOUT_S = 1.0
ENGINE_TIMEOUT_S = 4.0  # on a busy machine a heartbeat may be late
NOTICE_S = 60.0
CLOSE_S = 90.0


def start(model_folder, **options) -> EngineCoreClient:
    client = EngineCoreClient(make_config(model_folder, **options))
    client.wait_ready()
    return client


@pytest.fixture(scope="module")
def survivor(model_folder):
    """An engine that outlives what is done to it."""
    with start(model_folder) as client:
        yield client


@pytest.mark.parametrize("role", ["engine", "worker 0", "worker 1"])
def test_a_process_that_is_stopped_for_a_second_goes_on(survivor, role):
    pid = survivor.ready.pids[role]
    tokens = TokenReader(survivor, role, random.Random(3))
    tokens.add(20)
    tokens.take(WAIT_S)
    os.kill(pid, signal.SIGSTOP)
    try:
        call = survivor.collective_rpc
        with pytest.raises(RpcTimeoutError):
            call("echo", ["late"], timeout=0.1)
        time.sleep(0.9)
    finally:
        os.kill(pid, signal.SIGCONT)
    tokens.finish()
    assert call("echo", ["next"], timeout=WAIT_S) == [[0, "next"], [1, "next"]]


def test_a_front_end_that_is_stopped_for_a_second_goes_on(model_folder, tmp_path):
    command = [sys.executable, str(HERE / "serving_script.py"), model_folder, "500"]
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
def test_a_step_that_hangs_ends_at_its_limit_with_the_stacks(model_folder, caplog, how, rank, says):
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
        hung = caught.value.details["hung_ranks"]
        assert rank in hung
        assert caught.value.details["rank"] == (rank if hung == [rank] else None)  # where both look alike, none
        assert wait_until(lambda: not any(map(is_alive, pids.values())), NOTICE_S)
    log = caplog.text
    assert "step" in log
    assert log.count(f"rank {rank} (pid {pids[f'worker {rank}']})") >= 2, log  # a warning, and at the end
    assert says in log, log


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.long_form)])
def test_a_worker_stopped_for_ever_is_told_as_stopped(model_folder, caplog, rank):
    """The other one waits for it in a collective, and is not blamed."""
    with start(model_folder, step_timeout_s=STEP_TIMEOUT_S, stall_warning_s=0.4) as client:
        pids = client.ready.pids
        client.collective_rpc("hang_in_next_step", ["collective", rank], timeout=WAIT_S)
        os.kill(pids[f"worker {rank}"], signal.SIGSTOP)
        tokens = TokenReader(client, "t", random.Random(4))
        tokens.add(2)
        with pytest.raises(EngineDeadError, match="hung") as caught:
            tokens.finish()
        details = caught.value.details
        assert (details["process"], details["rank"], details["hung_ranks"]) == (f"worker {rank}", rank, [rank])
        assert "stopped" in caught.value.message
        assert wait_until(lambda: not any(map(is_alive, pids.values())), NOTICE_S)
    log = caplog.text
    assert "stopped" in log, log


def test_a_hang_is_healed_where_restarts_are_left(model_folder):
    # Long enough that no step of the new workers is taken for another hang.
    with start(model_folder, step_timeout_s=4 * STEP_TIMEOUT_S, max_worker_restarts=1) as client:
        client.collective_rpc("hang_in_next_step", ["python", 1], timeout=WAIT_S)
        tokens = TokenReader(client, "t", random.Random(5))
        tokens.add(3)
        tokens.finish()
        health = client.health()
        assert (health.state, health.num_restarts) == ("ready", 1)
        assert "hung" in health.restart_cause


@pytest.mark.parametrize(
    "how",
    [
        "generate",
        pytest.param("send", marks=pytest.mark.long_form),
        "call",
        pytest.param("nothing", marks=pytest.mark.long_form),
    ],
)
def test_an_engine_stopped_for_ever_is_ended_by_its_client(model_folder, how, caplog):
    """Also one that only waits for room to send, and one that waits for nothing."""
    with start(model_folder, engine_timeout_s=ENGINE_TIMEOUT_S) as client:
        pids = client.ready.pids
        if how == "generate":
            tokens = TokenReader(client, "t", random.Random(4))
            tokens.add(2)
        os.kill(pids["engine"], signal.SIGSTOP)
        if how == "nothing":
            assert wait_until(lambda: not any(map(is_alive, pids.values())), NOTICE_S)
        waits = {
            "send": lambda: client.collective_rpc("echo", [bytes(4 << 20)], timeout=WAIT_S),
            "call": lambda: client.collective_rpc("echo", ["x"]),
        }
        wait = waits.get(how, client.get_outputs)
        with pytest.raises(EngineDeadError, match=r"'engine' \(pid \d+\) hung: .*it was stopped") as caught:
            all(iter(wait, None))
        details = caught.value.details
        assert (details["process"], details["pid"], details["process_state"]) == ("engine", pids["engine"], "stopped")
        assert details["hung_s"] >= ENGINE_TIMEOUT_S
        assert f"engine_timeout_s={ENGINE_TIMEOUT_S}" in caught.value.message
        assert client.health().state == "dead"
        with pytest.raises(EngineDeadError, match="hung"):
            client.collective_rpc("echo", ["x"])
        assert wait_until(lambda: not any(map(is_alive, pids.values())), NOTICE_S)
    assert "hung" in caplog.text


def test_a_turn_of_the_engines_loop_that_does_not_end(model_folder, caplog):
    """Its heartbeat goes on."""
    with start(model_folder, engine_timeout_s=ENGINE_TIMEOUT_S, executor=HangingMultiproc) as client:
        with pytest.raises(EngineDeadError, match="an iteration of its loop did not end"):
            client.collective_rpc("hang_the_engine")
        assert "in forward" in caplog.text, "the stack"


@pytest.mark.parametrize("role", ["engine", pytest.param("worker 1", marks=pytest.mark.long_form)])
def test_a_process_that_is_stopped_before_the_engine_is_ready(tmp_path, role):
    """It is stopped where its worker is made, which holds up the start."""
    folder, pids = make_model_folder(tmp_path), tmp_path / "pids"
    with EngineCoreClient(make_config(folder, engine_timeout_s=ENGINE_TIMEOUT_S, executor=GatedMultiproc)) as client:
        assert wait_until(pids.exists, NOTICE_S)
        engine_pid, worker_pid = map(int, pids.read_text().split())
        os.kill(engine_pid if role == "engine" else worker_pid, signal.SIGSTOP)
        with pytest.raises(EngineDeadError, match="stopped") as caught:
            client.wait_ready()
        assert caught.value.details["process"] == role
        assert wait_until(lambda: not any(map(is_alive, [engine_pid, worker_pid])), NOTICE_S)


def test_a_start_that_takes_longer_than_the_engine_may_be_silent(tmp_path):
    folder = make_model_folder(tmp_path)
    with EngineCoreClient(make_config(folder, engine_timeout_s=ENGINE_TIMEOUT_S, executor=GatedMultiproc)) as client:
        assert wait_until((tmp_path / "pids").exists, NOTICE_S)
        time.sleep(ENGINE_TIMEOUT_S + 1)
        (tmp_path / "open").touch()
        assert client.wait_ready().max_model_len


def test_a_call_to_a_worker_that_is_stopped(model_folder):
    with start(model_folder, engine_timeout_s=ENGINE_TIMEOUT_S) as client:
        pids = client.ready.pids
        os.kill(pids["worker 1"], signal.SIGSTOP)
        with pytest.raises(EngineDeadError, match=r"rank 1 was stopped for .* while 'echo' was in flight") as caught:
            client.collective_rpc("echo", ["x"])
        assert caught.value.details["rank"] == 1
        assert wait_until(lambda: not any(map(is_alive, pids.values())), NOTICE_S)


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
