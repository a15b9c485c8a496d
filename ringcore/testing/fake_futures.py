"""The futures of a fake executor: what they come to is known at once, and seen when its time has come."""

from __future__ import annotations

from typing import Any

from ringcore.errors import EngineDeadError, RingcoreError, RpcTimeoutError
from ringcore.executor.ring_buffer import Buffer
from ringcore.executor.value_codec import decode_value, portable_error
from ringcore.executor.wire import STEP_METHOD
from ringcore.protocol.codec import encoder
from ringcore.protocol.steps import ModelRunnerOutput
from ringcore.testing.alarm import Alarm
from ringcore.testing.clock import HostClock, VirtualClock

__all__ = ["CallValues", "FailedCall", "StepFuture", "Timer", "too_late"]


class Timer:
    """The clock, and on the host's an alarm for callers that wait with poll()."""

    def __init__(self, clock: HostClock | VirtualClock, alarm: Alarm | None) -> None:
        self.clock, self._alarm = clock, alarm

    def has_come(self, time_s: float) -> bool:
        """If not, the descriptor becomes readable when it has."""
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


class StepFuture:
    """The `RpcFuture` of a step: its outcome is known already, and visible from `end_s` on."""

    def __init__(
        self, timer: Timer, started_s: float, end_s: float, outcome: ModelRunnerOutput | RingcoreError
    ) -> None:
        self._timer, self.started_s, self.end_s, self.outcome = timer, started_s, end_s, outcome

    def is_due(self) -> bool:
        return self._timer.clock.now() >= self.end_s

    def fail(self, error: EngineDeadError) -> None:
        self.outcome, self.end_s = error, self._timer.clock.now()

    def done(self) -> bool:
        return self._timer.has_come(self.end_s)

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        deadline_s = None if timeout is None else self._timer.clock.now() + timeout
        if deadline_s is not None and deadline_s < self.end_s:
            assert timeout is not None
            self._timer.clock.sleep_until(deadline_s)
            raise too_late(STEP_METHOD, timeout, 1)
        self._timer.clock.sleep_until(self.end_s)
        if isinstance(self.outcome, RingcoreError):
            raise self.outcome
        return self.outcome

    def encoded_result(self) -> list[list[Buffer]]:
        return [[encoder().encode(self.result())]]


class CallValues:
    """The `RpcFuture` of a call that went well on every rank."""

    def __init__(self, parts: dict[int, list[Buffer]], method: str, is_unique: bool) -> None:
        self._parts, self._method, self._is_unique = parts, method, is_unique

    def done(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> Any:
        values = [self._decoded(rank) for rank in sorted(self._parts)]
        return values[0] if self._is_unique else values

    def _decoded(self, rank: int) -> Any:
        try:
            return decode_value(self._parts[rank])
        except Exception as undecodable:
            raise portable_error(undecodable, rank, self._method) from undecodable

    def encoded_result(self) -> list[list[Buffer]]:
        return [list(self._parts[rank]) for rank in sorted(self._parts)]


class FailedCall:
    """The `RpcFuture` of a call that failed."""

    def __init__(self, error: RingcoreError) -> None:
        self._error = error

    def done(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> Any:
        raise self._error

    def encoded_result(self) -> list[list[Buffer]]:
        raise self._error


def too_late(method: str, timeout_s: float, num_ranks: int) -> RpcTimeoutError:
    return RpcTimeoutError(
        f"{method!r} took longer than {timeout_s} s; its value is dropped",
        method=method,
        timeout_s=timeout_s,
        missing_ranks=list(range(num_ranks)),
    )
