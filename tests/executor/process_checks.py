"""What tests ask of processes that they did not start themselves."""

from __future__ import annotations

import os
import signal
import time

from process_stat import is_alive

BOUND_S = 60.0


def is_gone(pid: int) -> bool:
    """Whether the process ends within a generous bound; one that nobody has reaped yet counts as gone.

    One that does not is killed, so that a failing test leaves nothing behind.
    """
    deadline = time.monotonic() + BOUND_S
    while time.monotonic() < deadline:
        if not is_alive(pid):
            return True
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    return False
