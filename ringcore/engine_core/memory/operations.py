"""What the engine does over several turns: calls to the workers and waits, one after the other, between steps.

An operation is a generator. It yields a future, and is sent its result or has its error thrown into it; or a condition,
a function, and goes on once that holds. Whoever drives it never waits for it: the engine's loop goes on meanwhile.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any

from ringcore.errors import RpcTimeoutError
from ringcore.executor.base import RpcFuture
from ringcore.executor.ring_buffer import Buffer
from ringcore.executor.value_codec import encode_value
from ringcore.params.field_checks import check_timeout

__all__ = ["Operation", "Operations", "Steps"]

Steps = Generator[RpcFuture | Callable[[], bool], Any, Any]


class Operations:
    """Operations in the order in which they were asked for, one at a time.

    turn: lets the engine go on by a step, waiting for it; called while the oldest one waits for a condition, by whoever
    waits for an operation in the engine's own thread.
    """

    def __init__(self, turn: Callable[[], None]) -> None:
        self._turn = turn
        self._queue: deque[Operation] = deque()

    def __bool__(self) -> bool:
        return bool(self._queue)

    def submit(
        self,
        name: str,
        steps: Steps,
        timeout: float | None = None,
        *,
        first: bool = False,
        is_by_rank: bool = False,
    ) -> Operation:
        """Begins it, if it is the only one.

        timeout: seconds that its caller waits; the operation itself is always brought to its end. first: before
        those that wait. is_by_rank: its value is a list, each entry a value of its own where they are encoded."""
        operation = Operation(self, name, steps, timeout, is_by_rank)
        if first:
            self._queue.appendleft(operation)
        else:
            self._queue.append(operation)
            self.drive()
        return operation

    def drive(self) -> None:
        """Goes on as far as is possible without waiting."""
        while self._queue:
            operation = self._queue[0]
            if not operation.go_on():
                return
            with suppress(ValueError):  # one that came first meanwhile
                self._queue.remove(operation)

    def wait(self, operation: Operation, deadline: float | None) -> None:
        """Drives until it is over or the deadline has passed."""
        while deadline is None or time.monotonic() < deadline:
            self.drive()
            if operation.done():
                return
            future = self._queue[0].future
            if future is None:
                self._turn()
                continue
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            with suppress(Exception):  # the operation meets it
                future.result(left_s)


class Operation:
    """One of them, and the `RpcFuture` of whoever asked for it."""

    def __init__(self, queue: Operations, name: str, steps: Steps, timeout: float | None, is_by_rank: bool) -> None:
        self._queue, self._name, self._steps, self._is_by_rank = queue, name, steps, is_by_rank
        self._timeout = timeout
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._waits_for: RpcFuture | Callable[[], bool] | None = None  # before its first turn
        self._is_over = False
        self._value: Any = None
        self._error: Exception | None = None

    @property
    def future(self) -> RpcFuture | None:
        """What it waits for, if that is a call to the workers."""
        return None if self._waits_for is None or callable(self._waits_for) else self._waits_for

    def go_on(self) -> bool:
        """Whether it is over. Never waits."""
        while not self._is_over:
            waits_for = self._waits_for
            if waits_for is None or callable(waits_for):
                if waits_for is not None and not waits_for():
                    return False
                self._take_turn(lambda: self._steps.send(None))
            elif not waits_for.done():
                return False
            else:
                self._take_result(waits_for)
        return True

    def _take_result(self, future: RpcFuture) -> None:
        try:
            value = future.result()
        except Exception as error:
            failure = error  # the name of an except clause is gone after it
            self._take_turn(lambda: self._steps.throw(failure))
        else:
            self._take_turn(lambda: self._steps.send(value))

    def _take_turn(self, turn: Callable[[], RpcFuture | Callable[[], bool]]) -> None:
        try:
            self._waits_for = turn()
        except StopIteration as end:
            self._is_over, self._value = True, end.value
        except Exception as error:
            self._is_over, self._error = True, error

    # -----------------------------------------------------------------------------------------------------------
    # As a future.

    def done(self) -> bool:
        """Whoever asks has the engine driven."""
        return self._is_over or (self._deadline is not None and time.monotonic() >= self._deadline)

    def result(self, timeout: float | None = None) -> Any:
        check_timeout("timeout", timeout)
        asked = None if timeout is None else time.monotonic() + timeout
        self._queue.wait(self, min((d for d in (asked, self._deadline) if d is not None), default=None))
        if not self._is_over:
            waited_s = self._timeout if timeout is None else timeout
            raise RpcTimeoutError(
                f"{self._name!r} took longer than {waited_s} s; the engine goes on with it",
                method=self._name,
                timeout_s=waited_s,
                missing_ranks=[],
            )
        if self._error is not None:
            raise self._error
        return self._value

    def encoded_result(self) -> list[list[Buffer]]:
        value = self.result()
        return [encode_value(one) for one in (value if self._is_by_rank else [value])]
