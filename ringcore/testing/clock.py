"""Clocks for an executor and its engine: the host's monotonic clock, or a virtual one that is advanced explicitly."""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "HostClock", "VirtualClock"]


class Clock(Protocol):
    def now(self) -> float:
        """Seconds; monotonic."""
        ...

    def sleep_until(self, time_s: float) -> None:
        """Returns at `time_s` or later."""
        ...


class HostClock:
    """The host's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()

    def sleep_until(self, time_s: float) -> None:
        while (left_s := time_s - time.monotonic()) > 0:
            time.sleep(left_s)


class VirtualClock:
    """Virtual time: advances only by `advance` and `sleep_until`, which return at once. Not thread-safe.

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
