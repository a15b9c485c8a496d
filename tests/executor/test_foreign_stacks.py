"""Stacks of processes that are not this process's children, asked for through /proc."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import child_entries
import pytest

from ringcore.executor.child_process import ChildProcess
from ringcore.executor.foreign_stacks import stacks_of

BOUND_S = 60.0


@pytest.fixture
def start():
    children = []
    read_fd, write_fd = os.pipe()

    def start_child(function) -> ChildProcess:
        entry = f"{child_entries.__name__}:{function.__name__}"
        children.append(ChildProcess.start("child", entry, b"", {"out": write_fd}))
        assert os.read(read_fd, 2) == b"up"
        return children[-1]

    yield start_child
    for child in children:
        child.signal(signal.SIGKILL)
        child.terminate()
    os.close(read_fd)
    os.close(write_fd)


def test_the_stacks_of_that_process_alone_and_its_parent_can_ask_too(start):
    """This process has the files of all of them open, as an engine has those of its workers."""
    still, refusing = start(child_entries.stand_still), start(child_entries.refuse_to_end)
    for _ in range(2):
        text = stacks_of(still.pid, BOUND_S)
        assert text.count("in stand_still") == 1
        assert "in _wait_on_the_side" in text
        assert "in refuse_to_end" in stacks_of(refusing.pid, BOUND_S)
        assert still.python_stacks(BOUND_S).count("in stand_still") == 1
    text = stacks_of(still.pid, BOUND_S)
    assert _stack_bytes(still) < 2 * len(text), "answers pile up"
    assert still.is_alive()
    assert refusing.is_alive()


def _stack_bytes(child: ChildProcess) -> int:
    """The size of its own file, the only one that it has of this kind."""
    links = Path(f"/proc/{child.pid}/fd").iterdir()
    (size,) = [link.stat().st_size for link in links if "ringcore-stacks" in os.readlink(link)]
    return size


def test_a_process_whose_native_code_holds_the_gil(start):
    child = start(child_entries.hold_the_gil)
    assert "in hold_the_gil" in stacks_of(child.pid, BOUND_S)


def test_a_process_of_others_is_not_sent_the_signal():
    """By default the signal would end it."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        assert stacks_of(other.pid) == "no process of ours: no stack"
        assert other.poll() is None
        other.communicate(b"\n")
        assert other.returncode == 0
    assert stacks_of(other.pid) == "gone: no stack"
