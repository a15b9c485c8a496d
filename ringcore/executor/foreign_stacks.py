"""The Python stacks of a process of ours that is not this process's child, and may hang: for its user, on its host.

Every child that `child_process` starts writes its stacks into a memfd when it gets `STACKS_SIGNAL` (`child_main`). Its
parent reads that memfd; here it is opened through /proc/PID/fd, which the kernel allows to the same user. A process has
the memfds of its own children open too: its own is the one that grows.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from ringcore.executor.child_main import STACKS_SIGNAL
from ringcore.executor.child_stacks import LOOK_S, MAX_BYTES, QUIET_S, process_state

__all__ = ["stacks_of"]


def stacks_of(pid: int, timeout_s: float = 1.0) -> str:
    """The stacks, or the reason why there are none. Never raises, and never harms another process: one that does not
    handle the signal is not sent it."""
    state = process_state(pid)
    if state in ("stopped", "zombie", "gone"):
        return f"{state}: no stack"
    with ExitStack() as stack:
        try:
            if not _handles_the_signal(pid):
                return "no process of ours: no stack"
            files = _stack_files(pid, stack)
            before = {fd: os.fstat(fd).st_size for fd in files}
            os.kill(pid, STACKS_SIGNAL)
            return _written(before, time.monotonic() + timeout_s) or f"no stack within {timeout_s} s"
        except OSError as error:
            return f"{error.strerror}: no stack"


def _handles_the_signal(pid: int) -> bool:
    for line in Path(f"/proc/{pid}/status").read_text("utf-8", "replace").splitlines():
        name, _, value = line.partition(":")
        if name == "SigCgt":
            return bool(int(value, 16) >> (STACKS_SIGNAL - 1) & 1)
    return False


def _stack_files(pid: int, stack: ExitStack) -> list[int]:
    found = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            if "ringcore-stacks" in os.readlink(link):
                fd = os.open(link, os.O_RDWR | os.O_CLOEXEC)
                stack.callback(os.close, fd)
                found.append(fd)
    return found


def _written(before: dict[int, int], deadline: float) -> str:
    """What is appended to one of these files until it is quiet. Then the file is as it was: its owner reads it from the
    start, and asks it whether the process is ready to be asked."""
    size, since, fd = 0, time.monotonic(), -1
    while (now := time.monotonic()) < deadline:
        time.sleep(LOOK_S)
        grown = {one: os.fstat(one).st_size - first for one, first in before.items()}
        one = max(grown, key=lambda fd: grown[fd], default=-1)
        if one != -1 and grown[one] > size:
            fd, size, since = one, grown[one], now
        elif size and now - since >= QUIET_S:
            break
    if fd == -1:
        return ""
    text = os.pread(fd, min(size, MAX_BYTES), before[fd]).decode(errors="replace").strip()
    os.ftruncate(fd, before[fd])
    return text
