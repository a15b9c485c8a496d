"""What is done about calls that take too long: with workers that really hang, and with ones made of paper."""

from __future__ import annotations

import gc
import logging
import os
import select
import signal
import threading
import time
import weakref

import fake_worker
import pytest
from fake_worker import FACTORY, fake_config, step
from process_checks import BOUND_S, is_gone
from running_executor import running

from ringcore.config import ParallelConfig
from ringcore.errors import EngineDeadError, WorkerError
from ringcore.executor.calls import CallTable
from ringcore.executor.multiproc import MultiprocExecutor
from ringcore.executor.stall_watch import StallWatch
from ringcore.executor.status_board import RankStatus
from ringcore.protocol.messages import RankHealth

LOGGER = "ringcore.executor.stall_watch"


def wait_until(condition) -> None:
    deadline = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ---------------------------------------------------------------------------------------------------------------
# Workers of paper.


class PaperReader:
    holds_reply = False

    def has_message(self) -> bool:
        return self.holds_reply


class PaperChild:
    name, pid = "worker 0", 4711

    def python_stacks(self) -> str:
        return "in a file, at a line"

    def last_log(self) -> list[str]:
        return ["said this"]


class PaperGroup:
    """One rank, idle, whose last call has the id 1."""

    def __init__(self) -> None:
        self.children, self.replies = [PaperChild()], [PaperReader()]
        self.killed_for = None

    def statuses(self):
        return [RankStatus(0, None, 1, "", 5)]

    def health(self):
        return [RankHealth(0, 4711, "sleeping", 0.5, None, 0.0, 5)]

    def kill(self, reason) -> None:
        self.killed_for = reason


class Watched:
    """A watch that looks when it is told, by a clock of its own."""

    def __init__(self, **limits) -> None:
        self.now = 0.0
        self.table, self.group = CallTable(1, clock=lambda: self.now), PaperGroup()
        self.watch = StallWatch(self.table, self.group, ParallelConfig(**limits))
        self.watch.stop()  # its own thread looks no more
        self.watch._is_stopping = False

    def look_at(self, now: float) -> None:
        self.now = now
        self.watch.look(self.table)


def test_a_warning_at_each_doubling_of_the_age(caplog):
    watched = Watched(stall_warning_s=10.0)
    watched.table.open_call(None, "load_model", None)
    with caplog.at_level(logging.WARNING, LOGGER):
        counts = []
        for now in (9.9, 10, 15, 20, 39, 40, 41, 79, 200, 300, 320):
            watched.look_at(now)
            counts.append(len(caplog.records))
    assert counts == [0, 1, 1, 2, 2, 3, 3, 3, 4, 4, 5]
    assert "calls in flight: 1; the oldest, for 10.0 s, is 'load_model' (call 1), missing ranks: 0" in caplog.text
    assert "rank 0 (pid 4711): idle, sleeping, heartbeat 0.5 s ago, 5 calls executed" in caplog.text
    assert "    in a file, at a line" in caplog.text


def test_another_call_is_warned_of_from_the_beginning(caplog):
    watched = Watched(stall_warning_s=10.0)
    call = watched.table.open_call(None, "first", None)
    with caplog.at_level(logging.WARNING, LOGGER):
        watched.look_at(100)
        watched.table.abandon(call)
        watched.table.open_call(None, "second", None)
        watched.look_at(109)
        assert len(caplog.records) == 1
        watched.look_at(110)
    assert len(caplog.records) == 2


def test_a_caller_who_does_not_come_for_a_reply_is_no_stall(caplog):
    watched = Watched(stall_warning_s=1.0, step_timeout_s=2.0)
    watched.table.open_step(None, 3, lambda part: part)
    watched.group.replies[0].holds_reply = True
    with caplog.at_level(logging.WARNING, LOGGER):
        watched.look_at(1000)
    assert not caplog.records
    assert watched.group.killed_for is None


def test_a_call_that_is_no_step_ends_nobody():
    watched = Watched(stall_warning_s=100.0, step_timeout_s=2.0)
    watched.table.open_call(None, "m", None)
    watched.look_at(50)
    assert watched.group.killed_for is None


def test_a_step_that_hangs_ends_the_workers_once(caplog):
    watched = Watched(stall_warning_s=100.0, step_timeout_s=2.0)
    watched.table.open_call(None, "m", None)
    watched.table.open_step(None, 3, lambda part: part)
    with caplog.at_level(logging.WARNING, LOGGER):
        watched.look_at(1.9)
        assert watched.group.killed_for is None
        watched.look_at(2.5)
        error = watched.group.killed_for
        watched.look_at(5)
    assert watched.group.killed_for is error
    assert len(caplog.records) == 1
    assert "step 3 hung: rank 0 did not finish 'execute_model' within 2.5 s" in error.message
    assert "in a file, at a line" in caplog.text
    assert error.details == {
        "process": "worker 0",
        "rank": 0,
        "exit_code": None,
        "signal": "SIGKILL",
        "last_log": ["said this"],
        "step": 3,
        "hung_ranks": [0],
        "hung_s": 2.5,
    }


def test_no_step_timeout_means_never():
    watched = Watched(stall_warning_s=1e6, step_timeout_s=None)
    watched.table.open_step(None, 3, lambda part: part)
    watched.look_at(1e5)
    assert watched.group.killed_for is None


# ---------------------------------------------------------------------------------------------------------------
# Workers that hang.


@pytest.mark.parametrize("asks", ["waits", "polls"])
def test_a_hung_step_is_killed_and_named(asks, caplog):
    with running(2) as executor, caplog.at_level(logging.ERROR, LOGGER):
        pids = executor.pids()
        assert executor.execute_model(step(41)).result(BOUND_S).step == 41
        stuck, behind = executor.execute_model(step(42, fake_worker.HANGS)), executor.execute_model(step(43))
        wait_until(lambda: all("_hang_in_here" in child.python_stacks() for child in executor._group.children))
        limited(executor, 0.2)
        while asks == "polls" and not stuck.done():
            assert select.select(executor.wait_fds(), [], [], BOUND_S)[0]
        errors = []
        for call in (lambda: stuck.result(BOUND_S), behind.result, lambda: executor.collective_rpc("echo")):
            with pytest.raises(EngineDeadError) as caught:
                call()
            errors.append(caught.value)
        assert all(map(is_gone, pids.values()))
        for error in errors:
            assert "step 42 hung: ranks 0, 1 did not finish 'execute_model'" in error.message
            assert "out-of-memory" not in error.message
            assert (error.details["process"], error.details["hung_ranks"]) == ("workers", [0, 1])
            assert (error.details["rank"], error.details["signal"]) == (None, "SIGKILL")
    assert caplog.text.count("_hang_in_here") == 2


def limited(executor, step_timeout_s: float) -> None:
    """A limit that begins to hold now: a machine may be slow at what came before."""
    executor._watch._step_timeout_s, executor._watch._period_s = step_timeout_s, 0.05
    executor._watch.wake()


def test_a_stopped_worker_hangs_its_step():
    with running(2) as executor:
        wait_until(lambda: all(one.method is None for one in executor.health()))  # it replies before it is idle
        before = executor.health()[1].num_calls
        os.kill(executor.pids()["worker 0"], signal.SIGSTOP)
        future = executor.execute_model(step(7))
        wait_until(lambda: executor.health()[1].num_calls > before)
        limited(executor, 0.2)
        with pytest.raises(EngineDeadError, match=r"step 7 hung: rank 0 did not .*was idle, stopped"):
            future.result(BOUND_S)


def test_a_hung_step_is_killed_while_nobody_asks():
    with running(1, step_timeout_s=0.2) as executor:
        executor.execute_model(step(1, fake_worker.HANGS))
        pidfd = executor._group.children[0].pidfd
        assert select.select([pidfd], [], [], BOUND_S)[0]
        with pytest.raises(EngineDeadError, match="step 1 hung"):
            executor.check()


def test_steps_that_are_slow_together_but_not_alone_live(tmp_path):
    with running(1, step_timeout_s=4.0) as executor:
        futures = []
        for number in range(6):
            futures += [executor.submit_rpc("nap", [0.8]), executor.execute_model(step(number))]
        assert futures[-1].result(BOUND_S).step == 5


def test_a_slow_call_is_diagnosed_while_another_thread_waits_for_it(caplog, tmp_path):
    gate = tmp_path / "gate"

    def warnings() -> list[str]:  # a slow start is another matter
        return [text for text in map(logging.LogRecord.getMessage, caplog.records) if "'wait_for_file' (call" in text]

    with running(2, stall_warning_s=0.1) as executor, caplog.at_level(logging.WARNING, LOGGER):
        waiter = threading.Thread(target=executor.collective_rpc, args=("wait_for_file", [str(gate), 1]))
        waiter.start()
        wait_until(lambda: len(warnings()) >= 2)
        gate.touch()
        waiter.join(BOUND_S)
        assert executor.collective_rpc("echo", [1]) == [1, 1]
    last = warnings()[1]
    assert "the oldest, for " in last
    assert "missing ranks: 1" in last
    assert "in wait_for_file" in last, "the stack"


def test_native_code_that_holds_the_gil_is_diagnosed(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with running(1) as executor:
        future = executor.submit_rpc("hold_the_gil", [str(fifo)])
        wait_until(lambda: executor.health()[0].heartbeat_age_s > 1.5)
        assert executor.health()[0].method == "hold_the_gil"
        report = executor.diagnose()
        assert "in 'hold_the_gil' for" in report
        assert "in hold_the_gil" in report, "the stack"
        assert not future.done()
        fifo.write_text("x")
        assert future.result(BOUND_S) == [None]


def test_a_stopped_worker_is_seen_without_being_asked():
    with running(2) as executor:
        pid = executor.pids()["worker 1"]
        os.kill(pid, signal.SIGSTOP)
        try:
            wait_until(lambda: executor.health()[1].process_state == "stopped")
            future = executor.submit_rpc("echo", [1])
            wait_until(lambda: executor.health()[1].heartbeat_age_s > 1.5)
            started = time.monotonic()
            report = executor.diagnose()
            assert time.monotonic() - started < 0.5 * BOUND_S
            assert "stopped: no stack" in report
            assert executor.health()[0].process_state in ("running", "sleeping")
            executor.check()
        finally:
            os.kill(pid, signal.SIGCONT)
        assert future.result(BOUND_S) == [1, 1]
        wait_until(lambda: executor.health()[1].heartbeat_age_s < 1.2)


# ---------------------------------------------------------------------------------------------------------------
# The thread itself.


def test_a_failed_call_wakes_who_sleeps_on_the_descriptors(tmp_path):
    """Its grace ends while no reply comes: somebody has to say so."""
    with running(2) as executor:
        future = executor.submit_rpc("wait_for_file", [str(tmp_path / "gate"), 0, 1])
        while not future.done():
            assert select.select(executor.wait_fds(), [], [], BOUND_S)[0]
        with pytest.raises(WorkerError):
            future.result()
        (tmp_path / "gate").touch()
        assert executor.collective_rpc("echo") == [None, None]


def test_the_watch_keeps_no_executor_alive_and_ends_with_it():
    def names() -> list[str]:
        return [thread.name for thread in threading.enumerate()]

    before = names().count("stall watch")
    executor = MultiprocExecutor(fake_config(stall_warning_s=0.2), worker_factory=FACTORY)
    executor.start()
    executor.submit_rpc("nap", [600.0])
    pids, alive = executor.pids(), weakref.ref(executor)
    assert names().count("stall watch") == before + 1
    del executor
    wait_until(lambda: gc.collect() >= 0 and alive() is None)
    assert all(map(is_gone, pids.values()))
    wait_until(lambda: names().count("stall watch") == before)
