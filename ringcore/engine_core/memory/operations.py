"""Operations that span several iterations of the engine's loop: calls to the workers and waits, between steps.

An operation is a generator (a coroutine). It yields a future, and is sent its result or has its error thrown into it;
or a condition, a function, and resumes once that is true. Driving it never blocks: the engine's loop continues.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any

from ringcore.errors import RpcTimeoutError
from ringcore.executor.ring_buffer import Buffer
from ringcore.executor.rpc_call import RpcFuture
from ringcore.executor.value_codec import encode_value
from ringcore.params.field_checks import check_timeout

__all__ = ["Operation", "Operations", "Steps"]

Steps = Generator[RpcFuture | Callable[[], bool], Any, Any]


class Operations:
    """A FIFO queue of operations, executed one at a time.

    run_step: runs one step of the engine and waits for it. `wait` calls it, in the engine's own thread, while the
    oldest operation waits for a condition.
    """

    def __init__(self, run_step: Callable[[], None]) -> None:
        self._run_step = run_step
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
        """Queues an operation and starts it if it is the only one.

        timeout: seconds that its caller waits; the operation itself always runs to its end. first: at the head of the
        queue. is_by_rank: its value is a list with one value per rank, which are encoded separately."""
        operation = Operation(self, name, steps, timeout, is_by_rank)
        if first:
            self._queue.appendleft(operation)
        else:
            self._queue.append(operation)
            self.drive()
        return operation

    def drive(self) -> None:
        """Advances the operations as far as possible without waiting."""
        while self._queue:
            operation = self._queue[0]
            if not operation.advance():
                return
            with suppress(ValueError):  # a nested `drive` has removed it already
                self._queue.remove(operation)

    def wait(self, operation: Operation, deadline: float | None) -> None:
        """Drives until the operation is over or the deadline has passed."""
        while deadline is None or time.monotonic() < deadline:
            self.drive()
            if operation.done():
                return
            future = self._queue[0].future
            if future is None:
                self._run_step()
                continue
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            with suppress(Exception):  # `drive` throws it into the operation
                future.result(left_s)


class Operation:
    """One operation, which is also its caller's `RpcFuture`."""

    def __init__(self, queue: Operations, name: str, steps: Steps, timeout: float | None, is_by_rank: bool) -> None:
        self._queue, self._name, self._steps, self._is_by_rank = queue, name, steps, is_by_rank
        self._timeout = timeout
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._waits_for: RpcFuture | Callable[[], bool] | None = None  # None: not started
        self._is_over = False
        self._value: Any = None
        self._error: Exception | None = None

    @property
    def future(self) -> RpcFuture | None:
        """The call to the workers that it waits for, if any."""
        return None if self._waits_for is None or callable(self._waits_for) else self._waits_for

    def advance(self) -> bool:
        """Advances it without waiting; returns whether it is over."""
        while not self._is_over:
            waits_for = self._waits_for
            if waits_for is None or callable(waits_for):
                if waits_for is not None and not waits_for():
                    return False
                self._resume(lambda: self._steps.send(None))
            elif not waits_for.done():
                return False
            else:
                self._send_result(waits_for)
        return True

    def _send_result(self, future: RpcFuture) -> None:
        try:
            value = future.result()
        except Exception as error:
            failure = error  # Python unbinds `error` at the end of the clause
            self._resume(lambda: self._steps.throw(failure))
        else:
            self._resume(lambda: self._steps.send(value))

    def _resume(self, resume: Callable[[], RpcFuture | Callable[[], bool]]) -> None:
        try:
            self._waits_for = resume()
        except StopIteration as end:
            self._is_over, self._value = True, end.value
        except Exception as error:
            self._is_over, self._error = True, error

    # -----------------------------------------------------------------------------------------------------------
    # As an `RpcFuture`.

    def done(self) -> bool:
        """Does not drive the engine: its loop, or `result`, does."""
        return self._is_over or (self._deadline is not None and time.monotonic() >= self._deadline)

    def result(self, timeout: float | None = None) -> Any:
        check_timeout("timeout", timeout)
        asked = None if timeout is None else time.monotonic() + timeout
        self._queue.wait(self, min((d for d in (asked, self._deadline) if d is not None), default=None))
        if not self._is_over:
            waited_s = self._timeout if timeout is None else timeout
            raise RpcTimeoutError(
                f"{self._name!r} took longer than {waited_s} s; the engine still finishes it",
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
