"""The steps of a fake executor: the outcome is computed at once, and becomes visible at its due time."""

from __future__ import annotations

from ringcore.errors import EngineDeadError, RingcoreError
from ringcore.executor.futures import StepInProcess
from ringcore.protocol.steps import ModelRunnerOutput
from ringcore.testing.alarm import Alarm
from ringcore.testing.clock import HostClock, VirtualClock

__all__ = ["StepFuture", "Timer"]


class Timer:
    """A clock, and on the host's clock a timerfd for callers that wait in poll()."""

    def __init__(self, clock: HostClock | VirtualClock, alarm: Alarm | None) -> None:
        self.clock, self._alarm = clock, alarm

    def has_come(self, time_s: float) -> bool:
        """Whether `time_s` has passed; if not, arms the descriptor to become readable then."""
        if self._alarm is not None:
            self._alarm.clear()
        if self.clock.now() >= time_s:
            return True
        if self._alarm is not None:
            self._alarm.set(time_s)
        return False

    def fds(self) -> list[int]:
        return [] if self._alarm is None else [self._alarm.fileno()]

    def close(self) -> None:
        if self._alarm is not None:
            self._alarm.close()
            self._alarm = None


class StepFuture(StepInProcess):
    """A step whose outcome is computed already, and not visible before `end_s`."""

    def __init__(
        self, timer: Timer, rank: int, started_s: float, end_s: float, outcome: ModelRunnerOutput | RingcoreError
    ) -> None:
        super().__init__(rank)
        self._timer, self.started_s, self.end_s, self.outcome = timer, started_s, end_s, outcome

    def is_due(self) -> bool:
        return self._timer.clock.now() >= self.end_s

    def fail(self, error: EngineDeadError) -> None:
        self.outcome, self.end_s = error, self._timer.clock.now()

    def _poll(self) -> None:
        if self._timer.has_come(self.end_s):
            self.settle(self.outcome)

    def _wait(self, timeout: float | None) -> None:
        clock = self._timer.clock
        deadline_s = None if timeout is None else clock.now() + timeout
        if deadline_s is not None and deadline_s < self.end_s:
            clock.sleep_until(deadline_s)
            return
        clock.sleep_until(self.end_s)
        self.settle(self.outcome)
