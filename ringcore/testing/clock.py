"""Clocks of an executor and its engine: the host's, or a virtual one."""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "HostClock", "VirtualClock"]


class Clock(Protocol):
    def now(self) -> float:
        """Seconds. Never goes back."""
        ...

    def sleep_until(self, time_s: float) -> None:
        """Returns when it is `time_s` or later."""
        ...


class HostClock:
    """The host's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()

    def sleep_until(self, time_s: float) -> None:
        while (left_s := time_s - time.monotonic()) > 0:
            time.sleep(left_s)


class VirtualClock:
    """Advances only by `sleep_until` and `advance`: a virtual day takes no time. Not thread-safe.

    Give `clock.now` to `EngineCore(config, executor, clock=clock.now)` and the clock to `FakeExecutor`.
    """

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        assert seconds >= 0, "time goes forward"
        self._now_s += seconds

    def sleep_until(self, time_s: float) -> None:
        self._now_s = max(self._now_s, time_s)
