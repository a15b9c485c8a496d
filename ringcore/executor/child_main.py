"""The first code of every child process: what `child_process` starts, before anything heavy is imported."""

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

__all__ = ["PARENT_DEATH", "run"]

PARENT_DEATH = "parent_death"  # the name, among the entry's descriptors, of one that hangs up when the parent ends


def run(header: Mapping[str, Any], payload: bytes) -> None:
    """Arms the parent's death, then calls the entry as `entry(payload, fds)`.

    `header` has `name`, `entry` ("module:function"), `fds` (by name), `parent_pid` and `path` (sys.path, already set).
    """
    fds: dict[str, int] = dict(header["fds"])
    _die_with_parent(fds[PARENT_DEATH], header["parent_pid"])
    # The terminal sends Ctrl-C to the whole process group, but only the process that the user started decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()  # a crash in native code leaves its stack in the log
    for fd in fds.values():
        os.set_inheritable(fd, False)
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as comm:
        comm.write(f"ringcore {header['name']}"[:15])  # what ps and top show
    module, function = header["entry"].split(":")
    vars(importlib.import_module(module))[function](payload, fds)


def _die_with_parent(pipe_fd: int, parent_pid: int) -> None:
    """Ends this process when its parent ends, however that comes about.

    Two lines, because each has a hole. The kernel sends SIGKILL when the last write end of the death pipe is closed:
    that works inside a C call that holds the GIL, but a process that the parent forked keeps a write end open. The
    thread also watches the parent's own pidfd: no fork hides that, but it needs the GIL. (PR_SET_PDEATHSIG would fire
    when the *thread* that created this process ends.)
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
    if os.getppid() != parent_pid or poll.poll(0):  # it ended before all this was armed
        os._exit(1)

    def watch() -> None:
        poll.poll()
        os._exit(1)

    threading.Thread(target=watch, name="parent-death", daemon=True).start()
