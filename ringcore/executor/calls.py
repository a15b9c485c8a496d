"""The calls under way: which ranks still owe a reply, and what has come. No process and no memory is touched here."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable
from typing import Any, Protocol

from ringcore.errors import RingcoreError, RpcTimeoutError
from ringcore.executor.wire import CREATED

__all__ = ["Call", "CallTable", "Driver", "StepCall"]


class Driver(Protocol):
    """Who takes in replies and settles calls with them."""

    def take_in(self) -> None:
        """Takes in what has arrived, without waiting."""
        ...

    def wait_for(self, call: Call, deadline: float | None) -> None:
        """Returns when the call is settled or `deadline` (monotonic seconds) has passed."""
        ...


class Call:
    """One call under way: an `RpcFuture`. Settled once, with a value or an error."""

    def __init__(
        self, driver: Driver, call_id: int, method: str, ranks: Iterable[int], timeout_s: float | None
    ) -> None:
        self.call_id, self.method = call_id, method
        self.timeout_s = timeout_s
        self.deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self.missing = set(ranks)
        self.values: dict[int, Any] = {}
        self.error: RingcoreError | None = None
        self.is_settled = False
        self._driver = driver

    def done(self) -> bool:
        if not self.is_settled:
            self._driver.take_in()
        return self.is_settled

    def result(self, timeout: float | None = None) -> Any:
        if not self.is_settled:
            self._driver.wait_for(self, None if timeout is None else time.monotonic() + timeout)
        if not self.is_settled:
            raise self.timeout_error(timeout)
        if self.error is not None:
            raise self.error
        return [self.values[rank] for rank in sorted(self.values)]

    def timeout_error(self, timeout_s: float | None) -> RpcTimeoutError:
        ranks = sorted(self.missing)
        return RpcTimeoutError(
            f"{self.method!r} was not answered by rank {', '.join(map(str, ranks))} within {timeout_s} s; "
            "the workers go on with it, and its late replies are dropped",
            method=self.method,
            timeout_s=timeout_s,
            missing_ranks=ranks,
        )

    def settle(self, error: RingcoreError | None = None) -> None:
        self.is_settled, self.error = True, error


class StepCall(Call):
    """A step: its value is the output rank's alone."""

    def result(self, timeout: float | None = None) -> Any:
        return super().result(timeout)[0]


class CallTable:
    """All calls under way.

    Invariant: `_open` holds exactly the calls that are not settled. A reply to any other id is late: it is dropped
    and counted, so that no error or timeout spoils a later call. Only a late *error of a step* is kept: a rank that
    failed in a step whose output was taken already has lost its place, and the steps after it must say so.
    """

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._open: dict[int, Call] = {}
        self._next_id = CREATED + 1
        self._step_error: RingcoreError | None = None
        self.num_late_replies = 0

    def open_creation(self, driver: Driver) -> Call:
        """The making of the workers: nobody asks for it, every rank reports it."""
        return self._add(Call(driver, CREATED, "create_worker", range(self._num_ranks), None))

    def open_call(self, driver: Driver, method: str, timeout_s: float | None) -> Call:
        """A call that every rank answers."""
        return self._add(Call(driver, self._new_id(), method, range(self._num_ranks), timeout_s))

    def open_step(self, driver: Driver) -> Call:
        """A step, which rank 0 answers. Settled already where an earlier step has failed on another rank."""
        call = self._add(StepCall(driver, self._new_id(), "execute_model", [0], None))
        if self._step_error is not None:
            self._settle(call, _another(self._step_error))
        return call

    def _add(self, call: Call) -> Call:
        self._open[call.call_id] = call
        return call

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def take_value(self, call_id: int, rank: int, value: Any) -> None:
        call = self._open.get(call_id)
        if call is None or rank not in call.missing:
            self.num_late_replies += 1
            return
        call.missing.remove(rank)
        call.values[rank] = value
        if not call.missing:
            self._settle(call)

    def take_error(self, call_id: int, error: RingcoreError, is_step: bool) -> None:
        """An error settles its call at once: other ranks may wait, in a collective, for the one that failed."""
        call = self._open.get(call_id)
        if call is not None:
            self._settle(call, error)
            return
        self.num_late_replies += 1
        if is_step and self._step_error is None:
            self._step_error = error
            for step in [c for c in self._open.values() if isinstance(c, StepCall)]:
                self._settle(step, _another(error))

    def method_of(self, call_id: int) -> str:
        call = self._open.get(call_id)
        return "a call that is over" if call is None else call.method

    def expire(self, now: float) -> None:
        """Settles the calls whose deadline has passed."""
        for call in [c for c in self._open.values() if c.deadline is not None and c.deadline <= now]:
            self._settle(call, call.timeout_error(call.timeout_s))

    def abandon(self, call: Call) -> None:
        """Forgets a call that was never sent."""
        self._open.pop(call.call_id, None)

    def fail_all(self, error: RingcoreError) -> None:
        for call in list(self._open.values()):
            self._settle(call, _another(error))

    def _settle(self, call: Call, error: RingcoreError | None = None) -> None:
        del self._open[call.call_id]
        call.settle(error)


def _another(error: RingcoreError) -> RingcoreError:
    """The same error as an object of its own: each raise leaves its traceback in the one that it raises."""
    return copy.copy(error)
