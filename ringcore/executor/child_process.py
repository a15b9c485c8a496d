"""Starts and ends one child process.

Not `multiprocessing`: the user's `__main__` is never imported again, so a script without a guard works, and there is no
resource tracker, no named semaphore and no pickle. The child gets `sys.path` and a payload of bytes
through inherited memory, and dies with its parent (see `child_main`).
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping

from ringcore.errors import EngineDeadError, RingcoreError
from ringcore.executor.adopted_process import AdoptedProcess, HandedOver
from ringcore.executor.child_boot import StartedProcess, boot_memory, start_process
from ringcore.executor.child_log import ChildLog
from ringcore.executor.child_main import NEXT_PARENT, NEXT_PID, PARENT_DEATH, STACKS
from ringcore.executor.child_stacks import ChildStacks, process_state
from ringcore.host.os_limits import os_limit_errors

__all__ = ["ChildProcess", "terminate_all"]

TERM_GRACE_S = 2.0
KILL_GRACE_S = 5.0


class ChildProcess:
    """A child process, from `start` to `terminate`. Safe to use from several threads.

    pid: its process id. pidfd: a descriptor that becomes readable when it ends; closed by `terminate`.
    """

    def __init__(
        self,
        name: str,
        process: StartedProcess | AdoptedProcess,
        fds: HandedOver,
        stacks: ChildStacks,
        next_fd: int | None = None,
    ) -> None:
        """Owns the descriptors, except if it raises. stacks: owns that of `fds`. next_fd: see `hand_over`."""
        self.name = name
        self.pid, self.pidfd = process.pid, fds.pidfd
        self._process, self._log_fd, self._next_fd = process, fds.log, next_fd
        self._log = ChildLog(name, fds.log)
        self._stacks = stacks
        self._lock = threading.RLock()  # a signal handler may close in the middle of a close
        self._owner_pid = os.getpid()
        self._fds = [fds.pidfd, fds.death, *([] if next_fd is None else [next_fd])]
        self._is_closed = False
        self._abandoned = weakref.finalize(self, _abandon, process, self._log, stacks, self._fds, os.getpid())

    @classmethod
    def start(
        cls,
        name: str,
        entry: str,
        payload: bytes = b"",
        fds: Mapping[str, int] | None = None,
        env: Mapping[str, str] | None = None,
        *,
        can_be_handed_over: bool = False,
    ) -> ChildProcess:
        """Starts a Python process that calls `entry` ("module:function") as `entry(payload, fds)`.

        `fds` are inherited under the same numbers, by name; the child gets two more: "parent_death", which hangs up
        when this process ends, and "stacks" (see `python_stacks`). `env` updates this process's environment. The child
        ignores SIGINT and has no stdin; its log records are logged here, its other output is copied to this process's
        stderr. can_be_handed_over: see `hand_over`; it has a session of its own, and no terminal.

        Raises `RingcoreError` if it cannot be started, `CapacityError` if the system lacks resources for it.
        """
        if not sys.executable:
            raise RingcoreError("cannot start a process: sys.executable is empty; set it to a Python interpreter")
        cannot = os_limit_errors(f"cannot start the process {name!r}")
        with cannot, contextlib.ExitStack() as inherited, contextlib.ExitStack() as ours:
            death_read, death_write = os.pipe2(os.O_CLOEXEC)
            inherited.callback(os.close, death_read)
            ours.callback(os.close, death_write)
            log_read, log_write = os.pipe2(os.O_CLOEXEC)
            inherited.callback(os.close, log_write)
            ours.callback(os.close, log_read)
            stacks = ChildStacks()
            ours.callback(stacks.close)
            passed = dict(fds or {}) | {PARENT_DEATH: death_read, STACKS: stacks.fileno()}
            next_write = None
            if can_be_handed_over:
                passed[NEXT_PARENT], next_write = os.pipe2(os.O_CLOEXEC)
                inherited.callback(os.close, passed[NEXT_PARENT])
                ours.callback(os.close, next_write)
            boot_fd = boot_memory(name, entry, payload, passed)
            inherited.callback(os.close, boot_fd)
            popen = start_process(name, boot_fd, log_write, [boot_fd, *passed.values()], env, can_be_handed_over)
            ours.callback(popen.wait)
            ours.callback(popen.kill)
            pidfd = os.pidfd_open(popen.pid)  # before a wait() reaps it: the pid is still valid
            ours.callback(os.close, pidfd)
            child = cls(name, popen, HandedOver(pidfd, death_write, log_read, stacks.fileno()), stacks, next_write)
            ours.pop_all()  # the child object owns them now
            return child

    @classmethod
    def adopt(cls, name: str, pid: int, fds: HandedOver) -> ChildProcess:
        """A process that another one has handed over; it dies with this process from now on. Owns the descriptors."""
        return cls(name, AdoptedProcess(pid, fds.pidfd), fds, ChildStacks(fds.stacks))

    def hand_over(self, owner_pid: int) -> HandedOver:
        """Has the process die with another one than this, and returns duplicates of what that one needs, which the
        caller sends there and closes; `release` must follow, or `terminate` if it was not received.

        Until this process ends or releases it, either's end is the process's. Only of one that was started so.
        """
        assert self._next_fd is not None, "start it with can_be_handed_over=True"
        handed = HandedOver(*map(os.dup, (self.pidfd, self._fds[1], self._log_fd, self._stacks.fileno())))
        self._log.stop()  # so that no line is read half here and half there
        os.write(self._next_fd, NEXT_PID.pack(owner_pid))
        return handed

    def release(self, on_end: Callable[[], None]) -> None:
        """Frees what this process holds of one that was handed over; a thread reaps it when it ends, and calls
        `on_end`."""
        with self._lock:
            self._free()

        def reap() -> None:
            self._process.wait()
            on_end()

        threading.Thread(target=reap, name=f"reaper of {self.name}", daemon=True).start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits for the process to end, and reaps it; whether it has ended."""
        if not self._process.has_ended and not self._is_closed:
            poll = select.poll()
            poll.register(self.pidfd, select.POLLIN)
            if not poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1e3):
                return False
            self._process.wait()
        return self._process.has_ended

    def is_alive(self) -> bool:
        return not self.wait(0)

    @property
    def exit_code(self) -> int | None:
        """The exit code, or None while it runs or if a signal ended it."""
        code = self._process.returncode
        return code if code is not None and code >= 0 else None

    @property
    def signal_name(self) -> str | None:
        """The signal that ended it, e.g. "SIGKILL"."""
        code = self._process.returncode
        if code is None or code >= 0:
            return None
        try:
            return signal.Signals(-code).name
        except ValueError:
            return f"signal {-code}"

    def describe_end(self) -> str:
        """How it ended, for a person: "killed by SIGKILL, often the out-of-memory killer", "exit code 3"."""
        if self.is_alive():
            return "still running"
        if self.signal_name == "SIGKILL":
            return "killed by SIGKILL, often the out-of-memory killer"
        if self._process.returncode is None:
            return "how is known to the process that started it alone"
        return f"killed by {self.signal_name}" if self.signal_name else f"exit code {self.exit_code}"

    def last_log(self) -> list[str]:
        """The last lines it printed, oldest first; complete once it has ended."""
        if not self.is_alive():
            self._log.finish(0.2)
        return self._log.lines()

    def dead_error(self, rank: int | None = None) -> EngineDeadError:
        """The error that reports how this process ended; `rank` if it is a worker."""
        last_log = self.last_log()
        message = f"the process {self.name!r} (pid {self.pid}) ended: {self.describe_end()}"
        if last_log:
            message += f"; it said last: {last_log[-1]}"
        return EngineDeadError(
            message,
            process=self.name,
            rank=rank,
            exit_code=self.exit_code,
            signal=self.signal_name,
            last_log=last_log,
        )

    @property
    def is_ours(self) -> bool:
        """Whether this process started it, and is no fork of the process that did."""
        return os.getpid() == self._owner_pid

    def signal(self, number: int) -> None:
        """Sends a signal, unless the child has ended, or this process is a fork of its parent."""
        if not self.is_ours:
            return
        with self._lock:
            if self.is_alive() and not self._is_closed:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self.pidfd, number)

    def process_state(self) -> str:
        """The kernel's state of it: "running", "sleeping", "disk sleep", "stopped", "zombie" or "gone"."""
        return process_state(self.pid) if not self._process.has_ended else "gone"

    def python_stacks(self, timeout_s: float = 0.5) -> str:
        """The Python stack of each of its threads, as text; requested by a signal, without other effect on the child.

        Works while native code holds the GIL too (see `request_stacks`). Without a stack it gives the reason:
        "stopped: no stack".
        """
        with self._lock:  # the descriptors stay open
            state = self.process_state()
            if self._is_closed or state in ("stopped", "zombie", "gone"):
                return f"{state}: no stack"
            return self._stacks.ask(self.pid, self.signal, timeout_s)

    def terminate(self, grace_s: float = 0.0) -> None:
        """Ends it and frees its descriptors here: see `terminate_all`. Idempotent."""
        terminate_all([self], grace_s)

    def _close(self) -> None:
        """Frees descriptors and the log's thread; the process has ended, or nothing can end it."""
        with self._lock:
            self._log.finish(0.2)
            self._free()

    def _free(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._abandoned.detach() is None:
            return  # the finalizer ran first, at interpreter exit
        self._log.stop()
        self._stacks.close()
        for fd in self._fds:
            os.close(fd)


def terminate_all(children: Iterable[ChildProcess], grace_s: float = 0.0) -> None:
    """Ends processes together: `grace_s` seconds to exit by themselves, SIGTERM and 2 more, then SIGKILL. Idempotent.

    Returns when all are reaped and their descriptors and threads are freed. In a fork of their parent it does nothing.
    """
    left = [child for child in children if not child._is_closed and child.is_ours]
    ended = list(left)
    try:
        for number, wait_s in ((None, grace_s), (signal.SIGTERM, TERM_GRACE_S), (signal.SIGKILL, KILL_GRACE_S)):
            if number is not None:
                for child in left:
                    child.signal(number)
            deadline = time.monotonic() + wait_s
            left = [child for child in left if not child.wait(deadline - time.monotonic())]
            if not left:
                break
    finally:  # an interrupt shortens the wait, and the processes still end
        for child in ended:
            child.signal(signal.SIGKILL)
            child.wait(KILL_GRACE_S)
            child._close()


def _abandon(
    process: StartedProcess | AdoptedProcess, log: ChildLog, stacks: ChildStacks, fds: list[int], owner_pid: int
) -> None:
    """Finalizer of a child whose owner was collected without `terminate`."""
    if os.getpid() != owner_pid:
        return  # a fork of the owner: not its child
    process.kill()
    process.wait()
    log.finish(0.2)
    log.stop()
    stacks.close()
    for fd in fds:
        os.close(fd)
