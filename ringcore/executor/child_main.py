"""The entry of every child process that `child_process` starts, before heavy imports."""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import gc
import importlib
import os
import select
import signal
import struct
import threading
from collections.abc import Mapping
from typing import Any

from ringcore.executor.stack_thread import arm_stack_dumps
from ringcore.host.log_forwarding import forward_logs
from ringcore.host.own_process import mark_own_process

__all__ = ["NEXT_PARENT", "NEXT_PID", "PARENT_DEATH", "STACKS", "run"]

# Names among the entry's descriptors.
PARENT_DEATH = "parent_death"  # hangs up when the parent ends
NEXT_PARENT = "next_parent"  # of a process that can be handed over: says with which process it dies from then on
STACKS = "stacks"  # a memfd in append mode, for the Python stacks that are requested (`stack_thread`)

NEXT_PID = struct.Struct("=i")  # what `NEXT_PARENT` says, once


def run(header: Mapping[str, Any], payload: bytes) -> None:
    """Arms the parent-death watch, then calls the entry as `entry(payload, fds)`.

    `header` has `name`, `entry` ("module:function"), `fds` (by name), `parent_pid`, `log_level` and `path` (sys.path,
    already set).
    """
    fds: dict[str, int] = dict(header["fds"])
    mark_own_process()
    arm_stack_dumps(fds[STACKS])  # before any other thread starts
    _die_with_parent(fds[PARENT_DEATH], header["parent_pid"], fds.get(NEXT_PARENT))
    # The terminal sends Ctrl-C to the whole process group, but only the process that the user started decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    forward_logs(header["name"], header["log_level"])
    faulthandler.enable()  # a crash in native code leaves its stack in the log
    for fd in fds.values():
        os.set_inheritable(fd, False)
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as comm:
        comm.write(f"ringcore {header['name']}"[:15])  # what ps and top show
    module, function = header["entry"].split(":")
    try:
        vars(importlib.import_module(module))[function](payload, fds)
    finally:
        gc.freeze()  # as it ends, the interpreter looks for garbage among all that torch and transformers have imported


def _die_with_parent(pipe_fd: int, parent_pid: int, next_fd: int | None) -> None:
    """Ends this process when its parent ends, in any way; or the process that `next_fd` names, if it does.

    Two mechanisms, as each has a gap. The kernel sends SIGKILL when the last write end of the death pipe is closed:
    that works inside a C call that holds the GIL, but a process that the parent forked keeps a write end open. The
    thread also watches the parent's pidfd: no fork hides its end, but the thread needs the GIL. (PR_SET_PDEATHSIG would
    fire when the *thread* that created this process ends.)
    """
    with contextlib.suppress(OSError):  # not every sandbox has signal-driven I/O
        fcntl.fcntl(pipe_fd, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(pipe_fd, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(pipe_fd, fcntl.F_SETFL, fcntl.fcntl(pipe_fd, fcntl.F_GETFL) | os.O_ASYNC)
    poll = _poll_of(pipe_fd, parent_pid)
    if os.getppid() != parent_pid or poll.poll(0):  # the parent ended before the watch was armed
        os._exit(1)

    def watch() -> None:
        watched = poll
        if next_fd is not None:
            watched.register(next_fd, select.POLLIN)
            watched.poll()
            watched = _poll_of(pipe_fd, _read_pid(next_fd))
        watched.poll()
        os._exit(1)

    threading.Thread(target=watch, name="parent-death", daemon=True).start()


def _poll_of(pipe_fd: int, pid: int) -> select.poll:
    """Of the death pipe, and the end of this process; ends this process if that one is gone."""
    poll = select.poll()
    poll.register(pipe_fd, select.POLLIN)
    try:
        poll.register(os.pidfd_open(pid), select.POLLIN)
    except ProcessLookupError:
        os._exit(1)
    except OSError:  # a sandbox without pidfds
        pass
    return poll


def _read_pid(next_fd: int) -> int:
    """The process that `next_fd` names; ends this process if the parent has ended without a word there."""
    os.set_blocking(next_fd, False)
    word = b""
    with contextlib.suppress(BlockingIOError):  # a fork of the parent keeps the pipe open
        word = os.read(next_fd, NEXT_PID.size)
    if len(word) < NEXT_PID.size:
        os._exit(1)
    return int(NEXT_PID.unpack(word)[0])
