"""The entry of every child process that `child_process` starts, before heavy imports."""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import importlib
import os
import select
import signal
import threading
from collections.abc import Mapping
from typing import Any

from ringcore.host.log_forwarding import forward_logs

__all__ = ["PARENT_DEATH", "STACKS", "STACKS_ARMED", "STACKS_SIGNAL", "run"]

# Names among the entry's descriptors.
PARENT_DEATH = "parent_death"  # hangs up when the parent ends
STACKS = "stacks"  # a memfd in append mode, for the Python stacks that `STACKS_SIGNAL` requests

STACKS_SIGNAL = signal.SIGRTMIN + 3  # no library uses it; SIGUSR1 and 2 belong to the user
STACKS_ARMED = b"armed\n"  # the memfd's first content: earlier, the signal would end the process


def run(header: Mapping[str, Any], payload: bytes) -> None:
    """Arms the parent-death watch, then calls the entry as `entry(payload, fds)`.

    `header` has `name`, `entry` ("module:function"), `fds` (by name), `parent_pid`, `log_level` and `path` (sys.path,
    already set).
    """
    fds: dict[str, int] = dict(header["fds"])
    _die_with_parent(fds[PARENT_DEATH], header["parent_pid"])
    _arm_stack_dumps(fds[STACKS])
    # The terminal sends Ctrl-C to the whole process group, but only the process that the user started decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    forward_logs(header["name"], header["log_level"])
    faulthandler.enable()  # a crash in native code leaves its stack in the log
    for fd in fds.values():
        os.set_inheritable(fd, False)
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as comm:
        comm.write(f"ringcore {header['name']}"[:15])  # what ps and top show
    module, function = header["entry"].split(":")
    vars(importlib.import_module(module))[function](payload, fds)


def _arm_stack_dumps(fd: int) -> None:
    """A signal handler in C writes the stacks, even while native code holds the GIL.

    SIG_IGN below it: at interpreter exit the handler is removed before the process ends.
    """
    signal.signal(STACKS_SIGNAL, signal.SIG_IGN)
    faulthandler.register(STACKS_SIGNAL, file=fd, all_threads=True, chain=False)
    os.write(fd, STACKS_ARMED)


def _die_with_parent(pipe_fd: int, parent_pid: int) -> None:
    """Ends this process when its parent ends, in any way.

    Two mechanisms, as each has a gap. The kernel sends SIGKILL when the last write end of the death pipe is closed:
    that works inside a C call that holds the GIL, but a process that the parent forked keeps a write end open. The
    thread also watches the parent's pidfd: no fork hides its end, but the thread needs the GIL. (PR_SET_PDEATHSIG would
    fire when the *thread* that created this process ends.)
    """
    with contextlib.suppress(OSError):  # not every sandbox has signal-driven I/O
        fcntl.fcntl(pipe_fd, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(pipe_fd, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(pipe_fd, fcntl.F_SETFL, fcntl.fcntl(pipe_fd, fcntl.F_GETFL) | os.O_ASYNC)
    watched = [pipe_fd]
    with contextlib.suppress(OSError):
        watched.append(os.pidfd_open(parent_pid))
    poll = select.poll()
    for fd in watched:
        poll.register(fd, select.POLLIN)
    if os.getppid() != parent_pid or poll.poll(0):  # the parent ended before the watch was armed
        os._exit(1)

    def watch() -> None:
        poll.poll()
        os._exit(1)

    threading.Thread(target=watch, name="parent-death", daemon=True).start()
