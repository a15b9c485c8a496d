"""Functions in threads that end by themselves."""

from __future__ import annotations

import threading
import time

import pytest

from ringcore.front_end.daemon_threads import DaemonThreads

WAIT_S = 30.0


def wait_for_no_thread(name):
    deadline = time.monotonic() + WAIT_S
    while any(thread.name == name for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_results_and_errors():
    threads = DaemonThreads("results")
    good, bad = threads.submit(lambda: 7), threads.submit(lambda: 1 / 0)
    assert good.result(WAIT_S) == 7
    with pytest.raises(ZeroDivisionError):
        bad.result(WAIT_S)
    assert not good.cancel()
    wait_for_no_thread("results")


def test_none_waits_for_another_without_a_limit():
    threads, barrier = DaemonThreads("barrier"), threading.Barrier(20)
    futures = [threads.submit(lambda: barrier.wait(WAIT_S)) for _ in range(20)]
    assert sorted(future.result(WAIT_S) for future in futures) == list(range(20))
    wait_for_no_thread("barrier")


def test_a_limit_is_kept():
    threads, lock, running = DaemonThreads("limited", 2), threading.Lock(), []
    most = [0]

    def function():
        with lock:
            running.append(None)
            most[0] = max(most[0], len(running))
        time.sleep(0.005)
        with lock:
            running.pop()

    for future in [threads.submit(function) for _ in range(20)]:
        future.result(WAIT_S)
    assert most == [2]
    wait_for_no_thread("limited")
    assert threads.submit(lambda: 1).result(WAIT_S) == 1  # and again


def test_where_no_thread_can_be_started(monkeypatch):
    threads = DaemonThreads("none", 1)

    def fail(self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", fail)
        with pytest.raises(RuntimeError, match="can't start"):
            threads.submit(lambda: pytest.fail("nobody waits for this"))
    assert threads.submit(lambda: 1).result(WAIT_S) == 1
