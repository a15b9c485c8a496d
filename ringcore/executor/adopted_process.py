"""A process that another one started and has handed over: `ChildProcess.hand_over` there, `ChildProcess.adopt` here."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from typing import NamedTuple

__all__ = ["AdoptedProcess", "HandedOver"]


class HandedOver(NamedTuple):
    """The descriptors of a process that its owner gives away; their holder closes them.

    pidfd: of the process. death: the write end of its death pipe. log: where its output is read. stacks: the memfd of
    its Python stacks.
    """

    pidfd: int
    death: int
    log: int
    stacks: int

    def close(self) -> None:
        for fd in self:
            os.close(fd)


class AdoptedProcess:
    """What `ChildProcess` asks of `StartedProcess`, of a process that is no child of this one.

    The kernel tells how a process ended to its parent alone, so `returncode` stays None.
    """

    returncode: int | None = None

    def __init__(self, pid: int, pidfd: int) -> None:
        """pidfd: stays the caller's."""
        self.pid, self.has_ended = pid, False
        self._pidfd = pidfd

    def wait(self) -> None:
        """Waits for its end."""
        if not self.has_ended:
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            poll.poll()
            self.has_ended = True

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
