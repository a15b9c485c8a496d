"""What only workers in processes of their own can do: die, lag, outlive, and answer too late."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import fake_worker
import pytest
from fake_worker import FACTORY, fake_config, step
from process_checks import BOUND_S, is_gone

from ringcore.errors import CapacityError, EngineDeadError, RpcTimeoutError, WorkerError
from ringcore.executor import multiproc, worker_group
from ringcore.executor.multiproc import MultiprocExecutor


@contextlib.contextmanager
def running(num_ranks: int = 1, trouble: str = ""):
    executor = MultiprocExecutor(fake_config(num_ranks, trouble), worker_factory=FACTORY)
    executor.start()
    try:
        yield executor
    finally:
        executor.shutdown()


@pytest.fixture(scope="module")
def pair():
    with running(2) as executor:
        yield executor


@pytest.fixture
def private_tmp(tmp_path, monkeypatch):
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


# ---------------------------------------------------------------------------------------------------------------
# Two ranks.


def test_values_are_in_rank_order(pair):
    for _ in range(50):
        assert [value["rank"] for value in pair.collective_rpc("who")] == [0, 1]
    assert pair.collective_rpc("nap", [0.03], {"on_rank": 0}) == [0, 1]


def test_each_rank_is_a_process_of_its_own(pair):
    assert pair.pids() == {f"worker {i}": value["pid"] for i, value in enumerate(pair.collective_rpc("who"))}
    assert os.getpid() not in pair.pids().values()


def test_the_ranks_met_in_a_private_directory_that_is_gone(private_tmp):
    with running(2) as executor:
        first, second = executor.collective_rpc("who")
        assert first["meeting"] == second["meeting"]
        assert Path(first["meeting"]).parent == private_tmp
        assert first["mode"] == 0o700
        assert list(private_tmp.iterdir()) == []
    with running(1) as executor:
        assert executor.collective_rpc("who")[0]["meeting"] is None


def test_the_output_rank_answers_for_a_step(pair):
    futures = [pair.execute_model(step(i)) for i in range(30)]
    assert [future.result(BOUND_S).step for future in futures] == list(range(30))


def test_the_error_of_one_rank_names_it(pair):
    with pytest.raises(WorkerError) as caught:
        pair.collective_rpc("fail", ["x", 1])
    assert caught.value.details["rank"] == 1
    assert pair.collective_rpc("echo", [2]) == [2, 2]


def test_an_error_does_not_wait_for_a_rank_that_hangs_and_its_late_reply_is_dropped(pair, tmp_path):
    before, gate = pair.num_late_replies, tmp_path / "gate"
    with pytest.raises(WorkerError) as caught:
        pair.collective_rpc("wait_for_file", [str(gate), 0, 1])
    assert caught.value.details["rank"] == 1
    gate.touch()
    assert pair.collective_rpc("echo", ["B"]) == ["B", "B"]
    assert pair.num_late_replies - before == 1


def test_a_timeout_names_the_missing_ranks_and_no_late_reply_answers_another_call(pair, tmp_path):
    before, gate = pair.num_late_replies, tmp_path / "gate"
    with pytest.raises(RpcTimeoutError) as caught:
        pair.collective_rpc("wait_for_file", [str(gate), 1], timeout=0.3)
    assert caught.value.details["missing_ranks"] == [1]
    gate.touch()
    assert [pair.collective_rpc("echo", [i]) for i in range(5)] == [[i, i] for i in range(5)]
    assert pair.num_late_replies - before == 1


def test_asking_with_a_timeout_does_not_give_the_call_up(pair, tmp_path):
    gate = tmp_path / "gate"
    future = pair.submit("wait_for_file", [str(gate), 0])
    with pytest.raises(RpcTimeoutError):
        future.result(timeout=0.01)
    assert not future.done()
    gate.touch()
    assert future.result(BOUND_S) == [0, 1]


def test_a_call_past_its_deadline_is_done(pair, tmp_path):
    gate = tmp_path / "gate"
    future = pair.submit("wait_for_file", [str(gate), 0], timeout=0.02)
    deadline = time.monotonic() + BOUND_S
    while not future.done():
        assert time.monotonic() < deadline
    with pytest.raises(RpcTimeoutError):
        future.result()
    gate.touch()
    assert pair.collective_rpc("echo") == [None, None]


def test_done_by_descriptor(pair):
    """As an event loop waits: sleep on the descriptors, ask, sleep again; they fall silent when all is taken."""
    future = pair.submit("nap", [0.02])
    while not future.done():
        assert select.select(pair.wait_fds(), [], [], BOUND_S)[0]
    assert future.result() == [0, 1]
    idle = pair.submit("echo")
    assert idle.result(BOUND_S) == [None, None]
    slow = pair.submit("nap", [0.05])
    while select.select(pair.wait_fds(), [], [], 0)[0]:
        assert not slow.done() or slow.result() == [0, 1]
    assert slow.result(BOUND_S) == [0, 1]


def test_many_large_calls_at_once_do_not_block_each_other(pair):
    """More replies than the reply rings hold, more calls than the call ring holds, and nobody asks meanwhile."""
    futures = [pair.submit("echo", [bytes([i]) * (3 << 20)]) for i in range(40)]
    for i, future in enumerate(futures):
        assert future.result(BOUND_S) == [bytes([i]) * (3 << 20)] * 2


def test_a_rank_that_fails_after_the_output_rank_answered_fails_the_steps_after():
    with running(2) as executor:
        future = executor.execute_model(step(0, fake_worker.RAISES_ON_RANK_1))
        # A call after the step settles only when rank 1 has reported the step, in whichever order the two replied.
        assert executor.collective_rpc("echo") == [None, None]
        with pytest.raises(WorkerError, match="step 0 on rank 1"):
            _all_results([future, executor.execute_model(step(1))])
        assert executor.num_late_replies == 1


def _all_results(futures):
    return [future.result(BOUND_S) for future in futures]


# ---------------------------------------------------------------------------------------------------------------
# The environment of a worker.


def test_threads_and_network_of_a_worker(monkeypatch):
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(multiproc, "usable_cores", lambda: 5)
    with running(2) as executor:
        assert executor.collective_rpc("environment", ["OMP_NUM_THREADS"]) == ["2", "2"]
        assert executor.collective_rpc("environment", ["OMP_WAIT_POLICY"]) == ["PASSIVE"] * 2
        assert executor.collective_rpc("environment", ["GLOO_SOCKET_IFNAME"]) == ["lo", "lo"]


@pytest.mark.parametrize(
    ("user", "cores", "workers", "ours"),
    [
        ({}, 1, 1, {"OMP_NUM_THREADS": "1"}),
        ({}, 2, 4, {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}),
        ({}, 8, 1, {"OMP_NUM_THREADS": "8", "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "100000"}),
        ({"OMP_NUM_THREADS": "1"}, 8, 1, {}),
        ({"OMP_NUM_THREADS": "3"}, 1, 1, {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "100000"}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, 8, 1, {"OMP_NUM_THREADS": "8"}),
        ({"GOMP_SPINCOUNT": "1", "GLOO_SOCKET_IFNAME": "eth0"}, 8, 2, {"OMP_NUM_THREADS": "4"}),
    ],
)
def test_the_user_environment_comes_first(user, cores, workers, ours):
    assert worker_group.worker_environment(user, cores, workers) == ours


def test_a_worker_ignores_ctrl_c():
    with running() as executor:
        assert executor.collective_rpc("interrupt_yourself") == ["still here"]


# ---------------------------------------------------------------------------------------------------------------
# Death of a worker.


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_idle_workers_death_ends_every_later_call(num_ranks):
    with running(num_ranks) as executor:
        pid = executor.pids()[f"worker {num_ranks - 1}"]
        os.kill(pid, signal.SIGKILL)
        assert select.select(executor.wait_fds(), [], [], BOUND_S)[0]
        for _ in range(3):
            with pytest.raises(EngineDeadError, match="SIGKILL, often the out-of-memory killer") as caught:
                executor.collective_rpc("echo")
            assert caught.value.details["process"] == f"worker {num_ranks - 1}"
            assert caught.value.details["rank"] == num_ranks - 1
            assert caught.value.details["signal"] == "SIGKILL"
        with pytest.raises(EngineDeadError):
            executor.execute_model(step(0))


@pytest.mark.parametrize(
    ("how", "signal_name", "exit_code"), [("kill", "SIGKILL", None), ("exit", None, 3), ("interrupt", "SIGINT", None)]
)
def test_a_death_in_a_call_ends_every_call_under_way(how, signal_name, exit_code):
    with running() as executor:
        assert executor.collective_rpc("echo", ["before"]) == ["before"]
        futures = [executor.submit("echo", [1]), executor.submit("leave", [how]), executor.submit("echo", [2])]
        with pytest.raises(EngineDeadError) as caught:
            futures[1].result(BOUND_S)
        details = caught.value.details
        assert (details["signal"], details["exit_code"]) == (signal_name, exit_code)
        assert details["last_log"][-1] == ("KeyboardInterrupt" if how == "interrupt" else f"leaving by {how}")
        assert futures[0].result() == [1]  # what was answered before the death counts
        assert futures[2].done()
        with pytest.raises(EngineDeadError):
            futures[2].result()


def test_a_death_in_a_step_is_noticed_while_waiting_and_while_asking():
    for ask in (False, True):
        with running(2) as executor:
            future = executor.execute_model(step(0, fake_worker.KILLS))
            while ask and not future.done():
                assert select.select(executor.wait_fds(), [], [], BOUND_S)[0]
            with pytest.raises(EngineDeadError):
                future.result(BOUND_S)


def test_a_worker_that_leaves_while_starting_is_told_with_its_last_words():
    executor = MultiprocExecutor(fake_config(trouble="exit in init"), worker_factory=FACTORY)
    with pytest.raises(EngineDeadError, match="exit code 3; it said last: about to leave"):
        executor.start()


def test_the_error_of_one_rank_at_start_ends_the_others(private_tmp, monkeypatch):
    monkeypatch.setattr(worker_group, "GRACE_S", 0.05)
    executor = MultiprocExecutor(fake_config(2, "rank 1 fails in init_device"), worker_factory=FACTORY)
    with pytest.raises(CapacityError, match="too little memory"):
        executor.start()
    assert all(map(is_gone, executor.pids().values()))
    assert list(private_tmp.iterdir()) == []


def test_a_factory_that_is_not_there():
    for factory, error in (("fake_worker:nothing", "no such function"), ("no_such_module:f", "ModuleNotFoundError")):
        executor = MultiprocExecutor(fake_config(), worker_factory=factory)
        with pytest.raises(Exception, match=error):
            executor.start()


# ---------------------------------------------------------------------------------------------------------------
# The end.


def test_shutdown_lets_calls_under_way_finish_but_not_be_asked():
    with running() as executor:
        future = executor.submit("nap", [0.05])
        pids = executor.pids()
        executor.shutdown()
        assert future.done()
        with pytest.raises(EngineDeadError, match="shut down"):
            future.result()
        assert all(map(is_gone, pids.values()))


def test_shutdown_from_another_thread_ends_a_wait(monkeypatch):
    monkeypatch.setattr(worker_group, "GRACE_S", 0.05)  # the worker sleeps: no patience helps
    with running() as executor:
        future = executor.submit("nap", [600.0])
        timer = threading.Timer(0.05, executor.shutdown)
        timer.start()
        with pytest.raises(EngineDeadError, match="shut down"):
            future.result()
        timer.join(BOUND_S)


def test_shutdown_in_a_signal_handler_ends_the_wait_below_it(monkeypatch):
    monkeypatch.setattr(worker_group, "GRACE_S", 0.05)
    with running() as executor:
        future = executor.submit("nap", [600.0])
        old = signal.signal(signal.SIGALRM, lambda *_: executor.shutdown())
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        try:
            with pytest.raises(EngineDeadError, match="shut down"):
                future.result()
        finally:
            signal.signal(signal.SIGALRM, old)


def test_a_worker_that_will_not_leave_is_made_to(monkeypatch):
    monkeypatch.setattr(worker_group, "GRACE_S", 0.05)
    with running(trouble="slow shutdown") as executor:
        pids = executor.pids()
        executor.shutdown()
        assert all(map(is_gone, pids.values()))


def test_nothing_is_left_of_an_executor_that_was_dropped():
    executor = MultiprocExecutor(fake_config(2), worker_factory=FACTORY)
    executor.start()
    pids = executor.pids()
    executor.submit("echo")
    del executor
    gc.collect()
    assert all(map(is_gone, pids.values()))


def test_descriptors_threads_and_files_stay_flat(private_tmp):
    def cycle() -> None:
        with running() as executor:
            executor.collective_rpc("zeros", [9 << 20])

    cycle()
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(10):
        cycle()
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before
    assert list(private_tmp.iterdir()) == []


SCRIPT = """
    import os, sys, time
    from fake_worker import FACTORY, fake_config
    from ringcore.executor.multiproc import MultiprocExecutor
    executor = MultiprocExecutor(fake_config(2), worker_factory=FACTORY)
    executor.start()
    if {busy}:
        executor.submit("nap", [600.0])
    print(*executor.pids().values(), flush=True)
    {then}
"""
FORKS = """
    fork_pid = os.fork()
    if fork_pid == 0:
        sys.exit(0)  # runs what the interpreter runs at exit
    os.waitpid(fork_pid, 0)
    print(executor.collective_rpc("echo", ["unharmed"]), flush=True)
    executor.shutdown()
"""


def run_script(tmp_path, busy: bool, then: str) -> tuple[subprocess.Popen[bytes], list[int]]:
    """A user's script without a `__main__` guard, and the pids of its workers."""
    script = tmp_path / "user_script.py"
    script.write_text(textwrap.dedent(SCRIPT).format(busy=busy, then=textwrap.dedent(then)))
    (tmp_path / "tmp").mkdir()
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    env = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path / "tmp")}
    script_process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, env=env)
    line = script_process.stdout.readline()
    assert line, script_process.wait()
    return script_process, [int(pid) for pid in line.split()]


@pytest.mark.parametrize("busy", [False, True])
def test_kill_9_of_the_parent_leaves_nothing(tmp_path, busy):
    parent, pids = run_script(tmp_path, busy, "time.sleep(600)")
    links = [os.readlink(f"/proc/{pid}/fd/{fd}") for pid in pids for fd in os.listdir(f"/proc/{pid}/fd")]
    assert not [link for link in links if link.startswith(("/dev/shm", "/tmp"))]  # no name, so none can stay
    parent.kill()
    parent.wait()
    assert all(map(is_gone, pids))
    assert list((tmp_path / "tmp").iterdir()) == []
    parent.stdout.close()


@pytest.mark.parametrize("then", ["sys.exit(0)", "executor = None; sys.exit(0)"])
def test_a_script_that_ends_without_shutdown_leaves_nothing(tmp_path, then):
    parent, pids = run_script(tmp_path, False, then)
    assert parent.wait(BOUND_S) == 0
    assert all(map(is_gone, pids))
    assert list((tmp_path / "tmp").iterdir()) == []
    parent.stdout.close()


def test_a_fork_of_the_parent_that_ends_harms_no_worker(tmp_path):
    parent, pids = run_script(tmp_path, False, FORKS)
    assert parent.wait(BOUND_S) == 0
    assert parent.stdout.read() == b"['unharmed', 'unharmed']\n"
    assert all(map(is_gone, pids))
    parent.stdout.close()
