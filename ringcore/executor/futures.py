"""The futures of every executor (`RpcFuture`): settled ones, and the waiting of those that are in flight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ringcore.errors import RingcoreError, RpcTimeoutError
from ringcore.executor.ring_buffer import Buffer
from ringcore.executor.value_codec import decode_value, portable_error
from ringcore.executor.wire import STEP_METHOD
from ringcore.params.field_checks import check_timeout
from ringcore.protocol.codec import encoder
from ringcore.protocol.steps import ModelRunnerOutput

__all__ = ["Failed", "InFlight", "StepInProcess", "Values", "decoded", "too_late"]


class Values:
    """A call that succeeded. Its values stay encoded until `result`.

    parts: the encoded values by rank. is_unique: the result is the one value, else a list in rank order.
    """

    def __init__(self, parts: Mapping[int, Sequence[Buffer]], method: str, is_unique: bool) -> None:
        self._parts, self._method, self._is_unique = parts, method, is_unique

    def done(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> Any:
        values = [decoded(self._parts[rank], rank, self._method, decode_value) for rank in sorted(self._parts)]
        return values[0] if self._is_unique else values

    def encoded_result(self) -> list[list[Buffer]]:
        return [list(self._parts[rank]) for rank in sorted(self._parts)]


class Failed:
    """A call that failed."""

    def __init__(self, error: RingcoreError) -> None:
        self._error = error

    def done(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> Any:
        raise self._error

    def encoded_result(self) -> list[list[Buffer]]:
        raise self._error


class InFlight(ABC):
    """A call or step in flight: settled once, with a value, which a subclass holds, or with `error`."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.is_settled = False
        self.error: RingcoreError | None = None

    @abstractmethod
    def _poll(self) -> None:
        """Settles it if its outcome is known; never blocks."""

    @abstractmethod
    def _wait(self, timeout: float | None) -> None:
        """Returns once it is settled, or after `timeout` seconds."""

    @abstractmethod
    def timeout_error(self, timeout_s: float | None) -> RpcTimeoutError:
        """The error of a wait that ended before the call."""

    def done(self) -> bool:
        if not self.is_settled:
            self._poll()
        return self.is_settled

    def wait(self, timeout: float | None) -> None:
        """Waits for the value; raises the call's error, and `RpcTimeoutError`."""
        check_timeout("timeout", timeout)
        if not self.is_settled:
            self._wait(timeout)
        if not self.is_settled:
            raise self.timeout_error(timeout)
        if self.error is not None:
            raise self.error


class StepInProcess(InFlight):
    """A step that an executor runs in its own process. rank: the one that executes it."""

    def __init__(self, rank: int) -> None:
        super().__init__(STEP_METHOD)
        self._rank = rank
        self._output: ModelRunnerOutput | None = None

    def settle(self, outcome: ModelRunnerOutput | RingcoreError) -> None:
        self.is_settled = True
        if isinstance(outcome, RingcoreError):
            self.error = outcome
        else:
            self._output = outcome

    def timeout_error(self, timeout_s: float | None) -> RpcTimeoutError:
        return too_late(self.method, timeout_s, [self._rank])

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        self.wait(timeout)
        assert self._output is not None, "a step is settled with its output or an error"
        return self._output

    def encoded_result(self) -> list[list[Buffer]]:
        return [[encoder().encode(self.result())]]


def decoded(parts: Sequence[Buffer], rank: int, method: str, decode: Callable[[Sequence[Buffer]], Any]) -> Any:
    """A rank's value. One that cannot be decoded is a `WorkerError` of this call alone."""
    try:
        return decode(parts)
    except Exception as undecodable:
        raise portable_error(undecodable, rank, method) from undecodable


def too_late(method: str, timeout_s: float | None, ranks: Sequence[int]) -> RpcTimeoutError:
    """The error of a call that was executed, but took longer than its timeout."""
    return RpcTimeoutError(
        f"{method!r} took longer than {timeout_s} s; its value is dropped",
        method=method,
        timeout_s=timeout_s,
        missing_ranks=list(ranks),
    )
