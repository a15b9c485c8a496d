"""A child process's Python stacks and its process state, read by its parent."""

from __future__ import annotations

import fcntl
import io
import os
import time
from collections.abc import Callable
from pathlib import Path

from ringcore.executor.child_main import STACKS_ARMED, STACKS_SIGNAL
from ringcore.executor.ring_memory import unnamed_file

__all__ = ["ChildStacks", "process_state"]

MAX_BYTES = 64 << 10
LOOK_S = 2e-3
QUIET_S = 20e-3  # a dump that has not grown for this long is complete: one handler run writes it

_STATES = {"R": "running", "S": "sleeping", "I": "sleeping", "D": "disk sleep", "T": "stopped", "t": "stopped"}


def process_state(pid: int) -> str:
    """ "running", "sleeping", "disk sleep", "stopped", "zombie" (ended, not reaped) or "gone"."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
    letter = stat.rsplit(")", 1)[1].split()[0]  # the process name before it may contain any character
    return _STATES.get(letter, "zombie" if letter == "Z" else "gone")


class ChildStacks:
    """The memfd into which one child writes its stacks. Not thread-safe.

    A file object and no bare descriptor: used after `close` it raises, and cannot touch a reused descriptor.
    """

    def __init__(self, fd: int | None = None) -> None:
        """fd: the memfd of a process that was handed over, which this owns then; None: a new one."""
        self._file = io.FileIO(unnamed_file("stacks") if fd is None else fd, "rb+")
        # Parent and child share the file offset: append mode lets the child write at the end after a truncate here.
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        fcntl.fcntl(self._file, fcntl.F_SETFL, flags | os.O_APPEND)
        self._is_armed = False

    def fileno(self) -> int:
        return self._file.fileno()

    def ask(self, send_signal: Callable[[int], None], timeout_s: float) -> str:
        """The stacks, or the reason why there are none. `send_signal` sends the child a signal."""
        try:
            self._is_armed = self._is_armed or self._size() >= len(STACKS_ARMED)
            if not self._is_armed:
                return "starting: no stack"
            self._file.truncate(0)
            send_signal(STACKS_SIGNAL)
            self._wait_until_quiet(time.monotonic() + timeout_s)
            text = os.pread(self.fileno(), MAX_BYTES, 0).decode(errors="replace").strip()
        except ValueError:  # closed meanwhile, by a signal handler in this thread
            return "gone: no stack"
        return text or f"no stack within {timeout_s} s"

    def _wait_until_quiet(self, deadline: float) -> None:
        size, since = 0, time.monotonic()
        while (now := time.monotonic()) < deadline:
            time.sleep(LOOK_S)
            if (new := self._size()) != size:
                size, since = new, now
            elif size and now - since >= QUIET_S:
                return

    def _size(self) -> int:
        return os.fstat(self.fileno()).st_size

    def close(self) -> None:
        self._file.close()
