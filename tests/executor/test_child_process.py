"""Real processes, started and ended in every way."""

from __future__ import annotations

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

import child_entries
import pytest
from process_checks import BOUND_S, is_gone

from ringcore.errors import EngineDeadError, RingcoreError
from ringcore.executor.adopted_process import HandedOver
from ringcore.executor.child_process import ChildProcess, terminate_all


def start(function, payload: bytes = b"", fds=None, env=None) -> ChildProcess:
    return ChildProcess.start("child", f"{child_entries.__name__}:{function.__name__}", payload, fds, env)


@pytest.fixture
def out():
    read_fd, write_fd = os.pipe()
    yield read_fd, write_fd
    os.close(read_fd)
    os.close(write_fd)


def test_the_entry_gets_payload_descriptors_and_environment(out, capfd):
    child = start(child_entries.talk, b"\x00\xff", {"out": out[1]}, {"RINGCORE_TEST": "1"})
    assert child.wait(BOUND_S)
    assert os.read(out[0], 100) == b"%d 1" % os.getpid()
    assert (child.exit_code, child.signal_name, child.describe_end()) == (0, None, "exit code 0")
    assert child.last_log() == ["got b'\\x00\\xff'", "to stderr"]
    child.terminate()
    assert capfd.readouterr().err == "[child] got b'\\x00\\xff'\n[child] to stderr\n"


def test_a_child_has_its_own_descriptors_and_no_others(tmp_path, out):
    """No sibling's, none of the parent's; the listing itself opens one (a number)."""
    other = start(child_entries.refuse_to_end, b"", {"out": out[1]})
    report = tmp_path / "fds"
    child = start(child_entries.list_fds, str(report).encode(), {"out": out[1]})
    assert child.wait(BOUND_S)
    is_private, handler, *found = report.read_text().split()
    assert (is_private, handler) == ("True", "SIG_IGN")
    numbers = [name for name in found if name.isdecimal()]
    assert sorted(set(found) - set(numbers)) == ["out", "parent_death", "stacks"]
    assert {"0", "1", "2"} <= set(numbers)
    assert len(numbers) <= 5  # standard streams, the parent's pidfd, the listing
    terminate_all([child])
    other.signal(signal.SIGKILL)
    other.terminate()


@pytest.mark.parametrize("code", [1, 3])
def test_an_exit_code_is_told(code):
    child = start(child_entries.leave, b"%d" % code)
    assert child.wait(BOUND_S)
    assert child.describe_end() == f"exit code {code}"
    assert child.exit_code == code
    child.terminate()


def test_a_signal_is_told(out):
    child = start(child_entries.refuse_to_end, b"", {"out": out[1]})
    assert os.read(out[0], 2) == b"up"
    assert child.describe_end() == "still running"
    assert child.is_alive()
    os.kill(child.pid, signal.SIGKILL)
    assert select.select([child.pidfd], [], [], BOUND_S)[0] == [child.pidfd]
    error = child.dead_error(rank=2)
    assert isinstance(error, EngineDeadError)
    assert "killed by SIGKILL, often the out-of-memory killer" in error.message
    assert error.details == {
        "process": "child",
        "rank": 2,
        "exit_code": None,
        "signal": "SIGKILL",
        "last_log": [],
    }
    child.terminate()


def test_an_exception_ends_in_the_last_log():
    child = start(child_entries.fail)
    assert child.wait(BOUND_S)
    assert child.last_log()[-1] == "ZeroDivisionError: as asked"
    assert child.dead_error().message.endswith("exit code 1; it said last: ZeroDivisionError: as asked")
    child.terminate()


def test_the_last_twenty_lines_are_kept(capfd):
    child = start(child_entries.many_lines)
    assert child.wait(BOUND_S)
    lines = child.last_log()
    assert len(lines) == 20
    assert lines[-1] == "end without newline"
    assert "line 999" in lines
    child.terminate()
    assert capfd.readouterr().err.count("[child] line ") == 1000


def test_patience_is_enough_for_a_child_that_leaves(out):
    read_fd, write_fd = os.pipe()
    child = start(child_entries.wait_for_end, b"", {"out": out[1], "in": read_fd})
    assert os.read(out[0], 2) == b"up"
    os.write(write_fd, b"x")
    child.terminate(BOUND_S)
    assert child.exit_code == 0
    os.close(read_fd)
    os.close(write_fd)


def test_sigterm_then_sigkill(out, monkeypatch):
    monkeypatch.setattr("ringcore.executor.child_process.TERM_GRACE_S", 0.05)
    read_fd, write_fd = os.pipe()
    mild = start(child_entries.wait_for_end, b"", {"out": out[1], "in": read_fd})
    stubborn = start(child_entries.refuse_to_end, b"", {"out": out[1]})
    assert os.read(out[0], 2) + os.read(out[0], 2) == b"upup"
    terminate_all([mild, stubborn], 0.01)
    assert (mild.signal_name, stubborn.signal_name) == ("SIGTERM", "SIGKILL")
    terminate_all([mild, stubborn])  # again does nothing
    os.close(read_fd)
    os.close(write_fd)


def test_nothing_is_left_of_a_child_that_was_dropped(out):
    child = start(child_entries.refuse_to_end, b"", {"out": out[1]})
    assert os.read(out[0], 2) == b"up"
    pid = child.pid
    del child
    gc.collect()
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def test_descriptors_and_threads_stay_flat():
    def cycle() -> None:
        child = start(child_entries.leave, b"0")
        child.wait(BOUND_S)
        child.terminate()

    cycle()
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(5):
        cycle()
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == before


def test_an_interpreter_that_is_not_there(monkeypatch):
    num_fds = len(os.listdir("/proc/self/fd"))
    for path, text in (("/no/python", "cannot start the process"), ("", "sys.executable is empty")):
        monkeypatch.setattr(sys, "executable", path)
        with pytest.raises(RingcoreError, match=text):
            start(child_entries.leave, b"0")
    assert len(os.listdir("/proc/self/fd")) == num_fds


# ---------------------------------------------------------------------------------------------------------------
# What can be seen of a child from outside.


def test_stacks_of_all_threads_again_and_again(out):
    child = start(child_entries.stand_still, b"", {"out": out[1]})
    assert os.read(out[0], 2) == b"up"
    for _ in range(3):
        text = child.python_stacks(BOUND_S)
        assert "in stand_still" in text
        assert "in _wait_on_the_side" in text
        assert text.count("in stand_still") == 1, "an answer holds no other"
    assert child.is_alive()
    assert child.process_state() in ("running", "sleeping")
    child.signal(signal.SIGKILL)
    assert child.wait(BOUND_S)
    assert (child.process_state(), child.python_stacks()) == ("gone", "gone: no stack")
    child.terminate()
    assert (child.process_state(), child.python_stacks()) == ("gone", "gone: no stack")


def test_stacks_though_native_code_holds_the_gil(out):
    child = start(child_entries.hold_the_gil, b"", {"out": out[1]})
    assert os.read(out[0], 2) == b"up"
    _wait_until_busy(child.pid)
    assert "in hold_the_gil" in child.python_stacks(BOUND_S)
    assert child.process_state() == "running"
    child.signal(signal.SIGKILL)
    child.terminate()


def test_stacks_of_threads_that_run_python(out):
    """Whose frames go while they are read: a handler that reads them without the GIL ends such a child soon."""
    child = start(child_entries.run_hard, b"", {"out": out[1]})
    assert os.read(out[0], 2) == b"up"
    for _ in range(40):
        assert "in forever" in child.python_stacks(BOUND_S)
        assert child.is_alive()
    child.signal(signal.SIGKILL)
    child.terminate()


def test_a_stopped_child_has_no_stack_and_is_not_waited_for(out):
    child = start(child_entries.stand_still, b"", {"out": out[1]})
    assert os.read(out[0], 2) == b"up"
    child.signal(signal.SIGSTOP)
    _wait_for_state(child, "stopped")
    assert child.python_stacks(600) == "stopped: no stack"
    child.signal(signal.SIGCONT)
    assert "in stand_still" in child.python_stacks(BOUND_S)
    child.signal(signal.SIGKILL)
    child.terminate()


def test_a_child_that_boots_or_leaves_is_not_killed_by_the_question():
    """The signal's own action, before the handler is there and when it is there no more, is the process's end."""
    child = start(child_entries.leave, b"7")
    while child.is_alive():
        child.python_stacks()
    assert child.exit_code == 7
    child.terminate()


def _wait_for_state(child: ChildProcess, state: str) -> None:
    deadline = time.monotonic() + BOUND_S
    while child.process_state() != state:
        assert time.monotonic() < deadline
        time.sleep(0.002)


# The parent's death. The parent is a script without a `__main__` guard, as a user may write it.

PARENT = """
    import os, sys, time
    from ringcore.executor.child_process import ChildProcess
    read_fd, write_fd = os.pipe()
    child = ChildProcess.start("child", {entry!r}, b"", {{"out": write_fd}})
    os.read(read_fd, 2)
    {then}
    print(child.pid, flush=True)
    time.sleep(600)
"""


def _wait_until_busy(pid: int) -> None:
    """Until the process has used far more of a core than it takes to start."""
    deadline = time.monotonic() + BOUND_S
    ticks = 0
    while ticks < 0.4 * os.sysconf("SC_CLK_TCK"):
        assert time.monotonic() < deadline
        ticks = int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11])


def _run_parent(tmp_path, entry: str, then: str = "pass") -> tuple[subprocess.Popen[bytes], int]:
    script = tmp_path / "user_script.py"
    script.write_text(textwrap.dedent(PARENT).format(entry=entry, then=then))
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    parent = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    )
    line = parent.stdout.readline()
    assert line, parent.wait()
    return parent, int(line)


@pytest.mark.parametrize("entry", ["refuse_to_end", "hold_the_gil"])
def test_the_child_dies_with_its_parent(tmp_path, entry):
    parent, child_pid = _run_parent(tmp_path, f"child_entries:{entry}")
    if entry == "hold_the_gil":
        _wait_until_busy(child_pid)
    parent.kill()
    parent.wait()
    assert is_gone(child_pid)
    parent.stdout.close()


def test_the_child_dies_with_its_parent_though_a_fork_keeps_the_pipe_open(tmp_path):
    fork = "fork_pid = os.fork() or time.sleep(600); print(fork_pid, flush=True)"
    parent, fork_pid = _run_parent(tmp_path, "child_entries:refuse_to_end", fork)
    child_pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    assert is_gone(child_pid)
    os.kill(fork_pid, signal.SIGKILL)
    parent.stdout.close()


def test_the_child_is_ended_when_its_parent_leaves(tmp_path):
    then = "print(child.pid, flush=True); sys.exit(0)"
    parent, child_pid = _run_parent(tmp_path, "child_entries:refuse_to_end", then)
    assert parent.wait(BOUND_S) == 0
    assert is_gone(child_pid)
    parent.stdout.close()


def test_an_entry_is_reached_without_a_heavy_import():
    code = "import sys; from ringcore.executor import child_main; print({'numpy', 'msgspec', 'zmq'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


# ---------------------------------------------------------------------------------------------------------------
# Handing over.


@pytest.fixture
def owner():
    """Another process, which gets a child. It has none of its descriptors."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def handed_over(out, owner) -> tuple[ChildProcess, HandedOver]:
    child = ChildProcess.start("child", "child_entries:refuse_to_end", b"", {"out": out[1]}, can_be_handed_over=True)
    os.read(out[0], 2)
    assert os.getsid(child.pid) == child.pid
    return child, child.hand_over(owner.pid)


def test_it_dies_with_its_next_owner(out, owner):
    child, fds = handed_over(out, owner)
    ended = threading.Event()
    child.release(ended.set)
    child.terminate()  # it is not this process's any more
    adopted = ChildProcess.adopt("child", child.pid, fds)
    assert adopted.is_alive()
    assert "refuse_to_end" in adopted.python_stacks()
    owner.kill()
    assert adopted.wait(BOUND_S)
    assert adopted.describe_end() == "how is known to the process that started it alone"
    assert (adopted.exit_code, adopted.signal_name) == (None, None)
    adopted.terminate()
    assert ended.wait(BOUND_S)
    assert not Path(f"/proc/{child.pid}").exists()  # it is reaped


def test_it_dies_with_the_last_descriptors_of_its_next_owner(out, owner):
    child, fds = handed_over(out, owner)
    child.release(lambda: None)
    fds.close()
    assert is_gone(child.pid)


def test_one_that_was_handed_over_can_still_be_ended(out, owner):
    """If its next owner did not get it."""
    child, fds = handed_over(out, owner)
    fds.close()
    child.signal(signal.SIGKILL)
    child.terminate()
    assert child.signal_name == "SIGKILL"
