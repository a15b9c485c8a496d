"""The end of workers, and of those who started them: wanted, unwanted, sudden."""

from __future__ import annotations

import gc
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import fake_worker
import pytest
from fake_worker import FACTORY, fake_config, step
from process_checks import BOUND_S, is_gone
from running_executor import running

from ringcore.errors import CapacityError, EngineDeadError
from ringcore.executor import worker_host
from ringcore.executor.multiproc import MultiprocExecutor

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
        futures = [
            executor.submit_rpc("echo", [1]),
            executor.submit_rpc("leave", [how]),
            executor.submit_rpc("echo", [2]),
        ]
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


def test_an_error_that_a_death_explains_is_told_as_the_death():
    """Rank 0 sees its connection break a moment before the kernel tells of rank 1."""
    with running(2) as executor:
        with pytest.raises(EngineDeadError) as caught:
            executor.execute_model(step(0, fake_worker.KILLS_RANK_1_RAISES_ON_0)).result(BOUND_S)
        assert (caught.value.details["rank"], caught.value.details["signal"]) == (1, "SIGKILL")


def test_the_ranks_that_are_left_are_ended_at_once(tmp_path):
    with running(2) as executor:
        executor.submit_rpc("wait_for_file", [str(tmp_path / "never"), 0])
        os.kill(executor.pids()["worker 1"], signal.SIGKILL)
        assert select.select(executor.wait_fds(), [], [], BOUND_S)[0]
        with pytest.raises(EngineDeadError, match="worker 1"):
            _check_until_it_raises(executor)
        assert is_gone(executor.pids()["worker 0"])


def _check_until_it_raises(executor) -> None:
    while True:
        executor.check()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_restart_after_a_kill(num_ranks, private_tmp):
    with running(num_ranks) as executor:
        num_fds = len(os.listdir("/proc/self/fd"))
        for _ in range(3):
            old_pids, old_fds = executor.pids(), set(executor.wait_fds())
            under_way = [executor.submit_rpc("nap", [600.0]), executor.execute_model(step(1))]
            os.kill(old_pids["worker 0"], signal.SIGKILL)
            with pytest.raises(EngineDeadError):
                under_way[0].result(BOUND_S)
            executor.restart()
            assert all(map(is_gone, old_pids.values()))
            for future in under_way:  # of before: they stay failed
                with pytest.raises(EngineDeadError, match="SIGKILL"):
                    future.result()
            executor.check()
            assert executor.pids().keys() == old_pids.keys()
            assert not set(executor.pids().values()) & set(old_pids.values())
            assert executor.collective_rpc("count", [1]) == [1] * num_ranks
            assert executor.collective_rpc("peek", timeout=BOUND_S)[0]["counter"] == 1
            assert executor.execute_model(step(9)).result(BOUND_S).step == 9
            assert len(old_fds) == len(executor.wait_fds())
        assert len(os.listdir("/proc/self/fd")) <= num_fds
        assert list(private_tmp.iterdir()) == []


def test_a_restart_with_calls_under_way_fails_them():
    with running() as executor:
        future = executor.submit_rpc("nap", [600.0])
        executor.restart()
        with pytest.raises(EngineDeadError, match="replaced under this call"):
            future.result()
        assert executor.collective_rpc("echo", [1]) == [1]


def test_a_death_in_a_restart_is_its_error_and_the_next_one_works(tmp_path):
    trouble = tmp_path / "trouble"
    with running(trouble=f"leave in load while there is {trouble}") as executor:
        trouble.touch()
        with pytest.raises(EngineDeadError, match="exit code 3"):
            executor.restart()
        with pytest.raises(EngineDeadError, match="exit code 3"):
            executor.submit_rpc("echo")
        trouble.unlink()
        executor.restart()
        assert executor.collective_rpc("echo", [1]) == [1]


def test_a_worker_that_leaves_while_starting_is_told_with_its_last_words():
    executor = MultiprocExecutor(fake_config(trouble="exit in init"), worker_factory=FACTORY)
    with pytest.raises(EngineDeadError, match="exit code 3; it said last: about to leave"):
        executor.start()


def test_the_error_of_one_rank_at_start_ends_the_others(private_tmp, monkeypatch):
    monkeypatch.setattr(worker_host, "GRACE_S", 0.05)
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
        future = executor.submit_rpc("nap", [0.05])
        pids = executor.pids()
        executor.shutdown()
        assert future.done()
        with pytest.raises(EngineDeadError, match="shut down"):
            future.result()
        assert all(map(is_gone, pids.values()))


def test_shutdown_from_another_thread_ends_a_wait(monkeypatch):
    monkeypatch.setattr(worker_host, "GRACE_S", 0.05)  # the worker sleeps: no patience helps
    with running() as executor:
        future = executor.submit_rpc("nap", [600.0])
        timer = threading.Timer(0.05, executor.shutdown)
        timer.start()
        with pytest.raises(EngineDeadError, match="shut down"):
            future.result()
        timer.join(BOUND_S)


def test_shutdown_in_a_signal_handler_ends_the_wait_below_it(monkeypatch):
    monkeypatch.setattr(worker_host, "GRACE_S", 0.05)
    with running() as executor:
        future = executor.submit_rpc("nap", [600.0])
        old = signal.signal(signal.SIGALRM, lambda *_: executor.shutdown())
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        try:
            with pytest.raises(EngineDeadError, match="shut down"):
                future.result()
        finally:
            signal.signal(signal.SIGALRM, old)


def test_a_worker_that_will_not_leave_is_made_to(monkeypatch):
    monkeypatch.setattr(worker_host, "GRACE_S", 0.05)
    with running(trouble="slow shutdown") as executor:
        pids = executor.pids()
        executor.shutdown()
        assert all(map(is_gone, pids.values()))


def test_nothing_is_left_of_an_executor_that_was_dropped():
    executor = MultiprocExecutor(fake_config(2), worker_factory=FACTORY)
    executor.start()
    pids = executor.pids()
    executor.submit_rpc("echo")
    del executor
    gc.collect()
    assert all(map(is_gone, pids.values()))


def test_descriptors_threads_and_files_stay_flat(private_tmp):
    def cycle() -> None:
        with running() as executor:
            executor.collective_rpc("zeros", [9 << 20])

    cycle()
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(4):
        cycle()
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before
    assert list(private_tmp.iterdir()) == []


SCRIPT = """
    import os, sys, time
    from fake_worker import FACTORY, fake_config
    from ringcore.executor.multiproc import MultiprocExecutor
    executor = MultiprocExecutor(fake_config(2, {options}), worker_factory=FACTORY)
    executor.start()
    if {busy}:
        executor.submit_rpc("nap", [600.0])
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


def run_script(tmp_path, busy: bool, then: str, options: str = "") -> tuple[subprocess.Popen[bytes], list[int]]:
    """A user's script without a `__main__` guard, and the pids of its workers."""
    script = tmp_path / "user_script.py"
    script.write_text(textwrap.dedent(SCRIPT).format(busy=busy, then=textwrap.dedent(then), options=options))
    (tmp_path / "tmp").mkdir()
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    env = {**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path / "tmp")}
    script_process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, env=env)
    line = script_process.stdout.readline()
    assert line, script_process.wait()
    return script_process, [int(pid) for pid in line.split()]


@pytest.mark.parametrize(
    ("busy", "options"), [(False, ""), (True, ""), (False, "large_messages='zmq'")], ids=["idle", "busy", "zmq"]
)
def test_kill_9_of_the_parent_leaves_nothing(tmp_path, busy, options):
    """Also before it has sent a large message."""
    parent, pids = run_script(tmp_path, busy, "time.sleep(600)", options)
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
