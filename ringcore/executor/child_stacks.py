"""A child process's Python stacks and its process state, read by its parent."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import time
from collections.abc import Callable
from pathlib import Path

from ringcore.executor.ring_memory import unnamed_file
from ringcore.executor.stack_thread import HUNG_SIGNAL, STACKS_ARMED, STACKS_SIGNAL, THREAD_NAME

__all__ = ["MAX_BYTES", "ChildStacks", "process_state", "request_stacks"]

MAX_BYTES = 64 << 10
LOOK_S = 2e-3
QUIET_S = 20e-3  # a dump that has not grown for this long is complete: one thread writes it
GIL_WAITS = 40  # of the thread that writes it, 5 ms each if it is scheduled: then native code holds the GIL

_STATES = {"R": "running", "S": "sleeping", "I": "sleeping", "D": "disk sleep", "T": "stopped", "t": "stopped"}


def process_state(pid: int) -> str:
    """ "running", "sleeping", "disk sleep", "stopped", "zombie" (ended, not reaped) or "gone"."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "gone"
    letter = stat.rsplit(")", 1)[1].split()[0]  # the process name before it may contain any character
    return _STATES.get(letter, "zombie" if letter == "Z" else "gone")


def request_stacks(pid: int, send_signal: Callable[[int], None], size: Callable[[], int], timeout_s: float) -> None:
    """Has a child write its stacks, and returns when they are complete, or after `timeout_s`.

    size: how much it has written. A thread of the child writes them under the GIL. If that has waited for the GIL
    `GIL_WAITS` times, native code holds it, and a C signal handler writes them: frames change under the GIL alone, but
    a child whose native code returns during the dump may crash. A child that is merely not scheduled does not wait for
    the GIL, so it is not put at that risk.
    """
    deadline = time.monotonic() + timeout_s
    waits = _GilWaits(pid)
    send_signal(STACKS_SIGNAL)
    if not _wait_until_quiet(size, deadline, lambda: waits.count() >= GIL_WAITS):
        if time.monotonic() < deadline:
            send_signal(HUNG_SIGNAL)
        _wait_until_quiet(size, deadline, lambda: False)


def _wait_until_quiet(size: Callable[[], int], deadline: float, gives_up: Callable[[], bool]) -> bool:
    """Whether a dump was written, and is complete as far as can be seen."""
    last, since = 0, time.monotonic()
    while (now := time.monotonic()) < deadline:
        time.sleep(LOOK_S)
        if (new := size()) != last:
            last, since = new, now
        elif last and now - since >= QUIET_S:
            return True
        elif not last and gives_up():
            return False
    return False


class _GilWaits:
    """How often the thread that writes a process's stacks has gone to sleep since this object was made."""

    def __init__(self, pid: int) -> None:
        self._status: Path | None = None
        with contextlib.suppress(OSError):
            tasks = Path(f"/proc/{pid}/task").iterdir()
            found = (task for task in tasks if (task / "comm").read_text().rstrip("\n") == THREAD_NAME)
            self._status = next((task / "status" for task in found), None)
        self._before = self._sleeps()

    def count(self) -> int:
        return self._sleeps() - self._before

    def _sleeps(self) -> int:
        """0 where the system does not tell."""
        with contextlib.suppress(OSError):
            if self._status is not None:
                for line in self._status.read_text("utf-8", "replace").splitlines():
                    name, _, value = line.partition(":")
                    if name == "voluntary_ctxt_switches":
                        return int(value)
        return 0


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

    def ask(self, pid: int, send_signal: Callable[[int], None], timeout_s: float) -> str:
        """The stacks of process `pid`, or the reason why there are none. `send_signal` sends it a signal."""
        try:
            self._is_armed = self._is_armed or self._size() >= len(STACKS_ARMED)
            if not self._is_armed:
                return "starting: no stack"
            self._file.truncate(0)
            request_stacks(pid, send_signal, self._size, timeout_s)
            text = os.pread(self.fileno(), MAX_BYTES, 0).decode(errors="replace").strip()
        except ValueError:  # closed meanwhile, by a signal handler in this thread
            return "gone: no stack"
        return text or f"no stack within {timeout_s} s"

    def _size(self) -> int:
        return os.fstat(self.fileno()).st_size

    def close(self) -> None:
        self._file.close()
