"""Reads the output of a child process line by line: log records are logged, text is copied to this process's stderr.
The last lines are kept.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections import deque

from ringcore.host.log_forwarding import FORWARDED, logged_line

__all__ = ["ChildLog"]

KEPT_LINES = 20
MAX_LINE_BYTES = 8192
MAX_RECORD_BYTES = 1 << 20
STDERR = 2


class ChildLog:
    """Reads lines from `read_fd`, which it then owns, until the child's side is closed or `stop` is called."""

    def __init__(self, name: str, read_fd: int) -> None:
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(
            target=_copy, args=(f"[{name}] ", read_fd, self._stop_fd, self._lines), name=f"log {name}", daemon=True
        )
        self._thread.start()

    def lines(self) -> list[str]:
        """The last lines, oldest first."""
        return list(self._lines)

    def finish(self, timeout_s: float) -> None:
        """Waits for the rest of an ended child's output, at most `timeout_s`: a grandchild may hold the pipe open."""
        self._thread.join(timeout_s)

    def stop(self, timeout_s: float = 0.2) -> None:
        """Copies what has arrived, then ends the thread. Idempotent."""
        if self._stop_fd < 0:
            return
        os.eventfd_write(self._stop_fd, 1)
        # The thread may block in a write to a stderr without a reader: thread and descriptor are leaked then.
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            os.close(self._stop_fd)
        self._stop_fd = -1


def _copy(prefix: str, read_fd: int, stop_fd: int, lines: deque[str]) -> None:
    poll = select.poll()
    poll.register(read_fd, select.POLLIN)
    poll.register(stop_fd, select.POLLIN)
    rest = b""
    try:
        while True:
            ready = [fd for fd, _ in poll.poll()]
            data = os.read(read_fd, 65536) if read_fd in ready else b""
            *whole, rest = (rest + data).split(b"\n")
            is_last = not data or stop_fd in ready
            if is_last or len(rest) > (MAX_RECORD_BYTES if rest.startswith(FORWARDED) else MAX_LINE_BYTES):
                whole, rest = [*whole, rest], b""
            _emit(prefix, [line for line in whole if line], lines)
            if is_last:
                return
    finally:
        os.close(read_fd)


def _emit(prefix: str, new: list[bytes], lines: deque[str]) -> None:
    texts = []
    for line in new:
        logged = logged_line(line)
        if logged is None:
            texts.append(line.decode(errors="replace").rstrip("\r"))
        lines.extend(texts[-1:] if logged is None else logged)
    if not texts:
        return
    with contextlib.suppress(OSError):  # this process's stderr may be closed; the lines are kept anyway
        # The descriptor, not sys.stderr: at interpreter exit a dead thread may still hold the lock of sys.stderr.
        os.write(STDERR, "".join(f"{prefix}{text}\n" for text in texts).encode(errors="replace"))
