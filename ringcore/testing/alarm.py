"""A timerfd: a file descriptor that becomes readable at a given time, for use in poll()."""

from __future__ import annotations

import ctypes
import os
import time

__all__ = ["Alarm"]

_TFD_NONBLOCK, _TFD_CLOEXEC, _TFD_TIMER_ABSTIME = os.O_NONBLOCK, os.O_CLOEXEC, 1


class _ITimerSpec(ctypes.Structure):
    _fields_ = [(name, ctypes.c_long) for name in ("interval_s", "interval_ns", "value_s", "value_ns")]


class Alarm:
    """One timerfd on the host's monotonic clock."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd: int = self._libc.timerfd_create(time.CLOCK_MONOTONIC, _TFD_NONBLOCK | _TFD_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")

    def fileno(self) -> int:
        return self._fd

    def set(self, time_s: float) -> None:
        """Readable from `time_s` (monotonic seconds) on, and not before."""
        nanoseconds = max(int(time_s * 1e9), 1)  # 0 would disarm the timer
        spec = _ITimerSpec(0, 0, *divmod(nanoseconds, 10**9))
        if self._libc.timerfd_settime(self._fd, _TFD_TIMER_ABSTIME, ctypes.byref(spec), None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def clear(self) -> None:
        """Disarms the timer: not readable until it is set again."""
        if self._libc.timerfd_settime(self._fd, 0, ctypes.byref(_ITimerSpec(0, 0, 0, 0)), None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
