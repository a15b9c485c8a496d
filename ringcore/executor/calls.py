"""The table of calls in flight: missing replies, received replies, deadlines. Pure state, without I/O."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from ringcore.errors import RingcoreError, RpcTimeoutError, error_to_wire
from ringcore.executor.futures import InFlight, Values, decoded
from ringcore.executor.ring_buffer import Buffer
from ringcore.executor.wire import CREATED, STEP_METHOD

__all__ = [
    "DEATH_GRACE_S",
    "ERROR_GRACE_S",
    "FAR_DEATH_GRACE_S",
    "Call",
    "CallTable",
    "Driver",
    "StepCall",
    "joined_error",
]

ERROR_GRACE_S = 0.2  # after a rank's error, for the other ranks' replies: they may hang in a collective
# After an error in a call that does not wait for the other ranks' replies: long enough for the kernel to report a dead
# rank, whose death is then the cause, and not the error that another rank had because of it.
DEATH_GRACE_S = 0.05
FAR_DEATH_GRACE_S = 1.0  # likewise, where the agent of another host tells of a rank's death


class Driver(Protocol):
    """The executor's side of a call: receives replies and settles calls with them."""

    def poll_replies(self) -> None:
        """Applies the replies that have arrived, without waiting."""
        ...

    def wait_for(self, call: Call, deadline: float | None) -> None:
        """Returns when the call is settled or `deadline` (monotonic seconds) has passed."""
        ...


class Call(InFlight):
    """A call in flight: an `RpcFuture`. Settled once, with the values of all replying ranks, or an error.

    missing: the ranks whose reply is missing. parts: the encoded values, by rank. errors: errors of ranks, by rank.
    due: when it settles without further replies, on the table's clock: its deadline, or an earlier grace period after
    an error. opened: when it was submitted. is_unique: one rank replies, and its value is the result. is_control: sent
    by the control channel, which overtakes ordered calls.
    """

    def __init__(
        self,
        driver: Driver,
        call_id: int,
        method: str,
        ranks: Iterable[int],
        opened: float,
        timeout_s: float | None = None,
        is_unique: bool = False,
        is_control: bool = False,
    ) -> None:
        super().__init__(method)
        self.call_id, self.opened, self.timeout_s = call_id, opened, timeout_s
        self.is_unique, self.is_control = is_unique, is_control
        self.deadline = self.due = None if timeout_s is None else opened + timeout_s
        self.missing = set(ranks)
        self.parts: dict[int, Sequence[Buffer]] = {}
        self.errors: dict[int, RingcoreError] = {}
        self._driver = driver

    def _poll(self) -> None:
        self._driver.poll_replies()

    def _wait(self, timeout: float | None) -> None:
        self._driver.wait_for(self, None if timeout is None else time.monotonic() + timeout)

    def result(self, timeout: float | None = None) -> Any:
        self.wait(timeout)
        return Values(self.parts, self.method, self.is_unique).result()

    def encoded_result(self) -> list[list[Buffer]]:
        self.wait(None)
        return Values(self.parts, self.method, self.is_unique).encoded_result()

    def timeout_error(self, timeout_s: float | None) -> RpcTimeoutError:
        ranks = sorted(self.missing)
        return RpcTimeoutError(
            f"{self.method!r} was not answered by rank {', '.join(map(str, ranks))} within {timeout_s} s; "
            "the workers continue it, and its late replies are dropped",
            method=self.method,
            timeout_s=timeout_s,
            missing_ranks=ranks,
        )

    def settle(self, error: RingcoreError | None = None) -> None:
        self.is_settled, self.error = True, error


class StepCall(Call):
    """A step, which the output rank answers. `step` is its number, `decode` decodes its value."""

    def __init__(
        self, driver: Driver, call_id: int, rank: int, opened: float, step: int, decode: Callable[[Buffer], Any]
    ) -> None:
        super().__init__(driver, call_id, STEP_METHOD, (rank,), opened, is_unique=True)
        self.step = step
        self._rank, self._decode = rank, decode

    def result(self, timeout: float | None = None) -> Any:
        self.wait(timeout)
        return decoded(self.parts[self._rank], self._rank, self.method, lambda parts: self._decode(parts[0]))


class CallTable:
    """All calls in flight.

    Invariant: `_open` holds exactly the unsettled calls, oldest first. A reply to any other id is late: it is dropped
    and counted, so that an error or timeout does not affect a later call. Only a late *error of a step* is kept: the
    state of a rank that failed in a step with its output already applied is invalid, and later steps must fail too.

    When a rank fails, the call waits for the other ranks' replies, `ERROR_GRACE_S` at most and not past the deadline;
    the call's error is that of the lowest failed rank, with all of them in its details, as "failures". A call with one
    replying rank settles with any rank's error at once, or after `DEATH_GRACE_S` if there are other ranks. With ranks
    on other hosts both wait `FAR_DEATH_GRACE_S`.
    """

    def __init__(
        self,
        num_ranks: int,
        output_rank: int = 0,
        clock: Callable[[], float] = time.monotonic,
        *,
        has_far_ranks: bool = False,
    ) -> None:
        self._num_ranks, self._output_rank = num_ranks, output_rank
        self._clock = clock
        self._unique_grace_s = FAR_DEATH_GRACE_S if has_far_ranks else DEATH_GRACE_S
        self._grace_s = FAR_DEATH_GRACE_S if has_far_ranks else ERROR_GRACE_S
        self._open: dict[int, Call] = {}
        self._next_id = CREATED + 1
        self._step_error: tuple[int, RingcoreError] | None = None
        self._progress_at = clock()  # when an ordered call was last settled
        self.num_late_replies = 0

    # -----------------------------------------------------------------------------------------------------------
    # Opening.

    def open_creation(self, driver: Driver) -> Call:
        """The creation of the workers, which every rank reports without a call. Clears the error of a failed step."""
        self._step_error = None
        return self._add(Call(driver, CREATED, "create_worker", range(self._num_ranks), self._clock()))

    def open_call(
        self,
        driver: Driver,
        method: str,
        timeout_s: float | None,
        unique_reply_rank: int | None = None,
        is_control: bool = False,
    ) -> Call:
        """A call that every rank answers, or one rank only."""
        is_unique = unique_reply_rank is not None
        ranks = range(self._num_ranks) if unique_reply_rank is None else [unique_reply_rank]
        return self._add(Call(driver, self._new_id(), method, ranks, self._clock(), timeout_s, is_unique, is_control))

    def open_step(self, driver: Driver, step: int, decode: Callable[[Buffer], Any]) -> Call:
        """A step, which the output rank answers. The caller must not send it if it has errors already, from an earlier
        step."""
        call = self._add(StepCall(driver, self._new_id(), self._output_rank, self._clock(), step, decode))
        if self._step_error is not None:
            rank, error = self._step_error
            self._fail(call, rank, _copy_of(error))
        return call

    def _add(self, call: Call) -> Call:
        self._open[call.call_id] = call
        return call

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    # -----------------------------------------------------------------------------------------------------------
    # Replies.

    def take_value(self, call_id: int, rank: int, parts: Sequence[Buffer]) -> None:
        """Applies a rank's encoded value, in buffers that the call may keep."""
        call = self._open.get(call_id)
        if call is None or rank not in call.missing:
            self.num_late_replies += 1
            return
        call.missing.remove(rank)
        call.parts[rank] = parts
        if not call.missing and not (call.is_unique and call.errors):
            self._settle(call)

    def take_error(self, call_id: int, rank: int, error: RingcoreError, is_step: bool) -> None:
        call = self._open.get(call_id)
        if call is not None:
            self._fail(call, rank, error)
            return
        self.num_late_replies += 1
        if is_step and self._step_error is None:
            self._step_error = rank, error
            for step in [c for c in self._open.values() if isinstance(c, StepCall)]:
                self._fail(step, rank, _copy_of(error))

    def _fail(self, call: Call, rank: int, error: RingcoreError) -> None:
        call.errors.setdefault(rank, error)
        call.missing.discard(rank)
        if self._num_ranks == 1 or not (call.is_unique or call.missing):
            self._settle(call)
            return
        end = self._clock() + (self._unique_grace_s if call.is_unique else self._grace_s)
        call.due = end if call.due is None else min(end, call.due)

    def method_of(self, call_id: int) -> str:
        call = self._open.get(call_id)
        return "a call that is over" if call is None else call.method

    # -----------------------------------------------------------------------------------------------------------
    # Ends.

    def expire(self) -> None:
        """Settles the calls that are due: with the ranks' errors, else with a timeout."""
        now = self._clock()
        for call in [c for c in self._open.values() if c.due is not None and c.due <= now]:
            self._settle(call, None if call.errors else call.timeout_error(call.timeout_s))

    def abandon(self, call: Call) -> None:
        """Removes a call that was never sent."""
        self._open.pop(call.call_id, None)

    def fail_all(self, error: RingcoreError, dead_rank: int | None = None) -> None:
        """Settles every call with `error`; a call in which the dead rank had raised an error keeps that one."""
        for call in list(self._open.values()):
            self._settle(call, None if dead_rank in call.errors else _copy_of(error))

    def _settle(self, call: Call, error: RingcoreError | None = None) -> None:
        """Settles with `error`, else with the errors of its ranks, else with its values."""
        del self._open[call.call_id]
        if not call.is_control:
            self._progress_at = self._clock()
        if error is None and call.errors:
            error = joined_error(call.errors)
        call.settle(error)

    # -----------------------------------------------------------------------------------------------------------
    # Called from any thread.

    def in_flight(self) -> list[Call]:
        """The unsettled calls, oldest first."""
        while True:
            try:
                return list(self._open.values())
            except RuntimeError:  # another thread opened or settled a call during the copy
                continue

    def next_due(self) -> float | None:
        """When the next call with errors is due; waiting callers watch deadlines themselves."""
        return min((c.due for c in self.in_flight() if c.errors and c.due is not None), default=None)

    def age_s(self, call: Call) -> float:
        """Seconds that a call has been in flight, without the time in which it waited for earlier calls."""
        started = call.opened if call.is_control else max(call.opened, self._progress_at)
        return self._clock() - started

    def oldest_step(self) -> StepCall | None:
        return next((call for call in self.in_flight() if isinstance(call, StepCall)), None)


def joined_error(errors: dict[int, RingcoreError]) -> RingcoreError:
    """The error of the lowest rank, with the errors of all ranks in its details."""
    failures = []
    for rank in sorted(errors):
        wire = error_to_wire(errors[rank])
        failures.append({"rank": rank, **wire, "details": dict(wire["details"])})
    error = errors[min(errors)]
    error.details["failures"] = failures
    return error


def _copy_of(error: RingcoreError) -> RingcoreError:
    """A copy of the error: each raise writes its traceback into the object."""
    return copy.copy(error)
