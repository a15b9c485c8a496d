"""The Python stacks of a process of ours that is not this process's child, and may hang: for its user, on its host.

Every child that `child_process` starts writes its stacks into a memfd when it gets a signal (`stack_thread`). Its
parent reads that memfd; here it is opened through /proc/PID/fd, which the kernel allows to the same user. A process has
the memfds of its own children open too: its own is the one that grows.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

from ringcore.executor.child_stacks import MAX_BYTES, process_state, request_stacks
from ringcore.executor.stack_thread import HUNG_SIGNAL

__all__ = ["stacks_of"]


def stacks_of(pid: int, timeout_s: float = 1.0) -> str:
    """The stacks, or the reason why there are none. Never raises, and never harms another process: one that does not
    handle the signal is not sent it."""
    state = process_state(pid)
    if state in ("stopped", "zombie", "gone"):
        return f"{state}: no stack"
    with ExitStack() as stack:
        try:
            if not _handles_the_signals(pid):
                return "no process of ours: no stack"
            files = _stack_files(pid, stack)
            before = {fd: os.fstat(fd).st_size for fd in files}
            request_stacks(pid, partial(os.kill, pid), lambda: max(_grown(before).values(), default=0), timeout_s)
            return _written(before) or f"no stack within {timeout_s} s"
        except OSError as error:
            return f"{error.strerror}: no stack"


def _handles_the_signals(pid: int) -> bool:
    """`HUNG_SIGNAL` has its handler once the other one is blocked; a program that a process of ours starts has none."""
    for line in Path(f"/proc/{pid}/status").read_text("utf-8", "replace").splitlines():
        name, _, value = line.partition(":")
        if name == "SigCgt":
            return bool(int(value, 16) >> (HUNG_SIGNAL - 1) & 1)
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


def _grown(before: dict[int, int]) -> dict[int, int]:
    return {fd: os.fstat(fd).st_size - size for fd, size in before.items()}


def _written(before: dict[int, int]) -> str:
    """What was appended to one of these files. Then the file is as it was: its owner reads it from the start, and asks
    it whether the process is ready to be asked."""
    grown = _grown(before)
    fd = max(grown, key=lambda fd: grown[fd], default=-1)
    if fd == -1 or grown[fd] <= 0:
        return ""
    text = os.pread(fd, min(grown[fd], MAX_BYTES), before[fd]).decode(errors="replace").strip()
    os.ftruncate(fd, before[fd])
    return text
