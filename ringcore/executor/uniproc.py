"""The executor with its one worker in this process: no messages, a call is executed when it is submitted.

A step may only be launched then (`PendingOutput`): it is finished when its future is polled, or before the next call.
"""

from __future__ import annotations

import copy
import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from ringcore.config import EngineConfig
from ringcore.errors import ConfigError, EngineDeadError, RingcoreError, RpcTimeoutError
from ringcore.executor.base import EncodedCall, Executor, RpcFuture, check_reply_rank
from ringcore.executor.calls import joined_error
from ringcore.executor.child_stacks import process_state
from ringcore.executor.launched_steps import is_done, launch_step, poll_until, step_result
from ringcore.executor.ring_buffer import Buffer
from ringcore.executor.timing import add_parts, timed
from ringcore.executor.value_codec import decode_error, decode_value, portable_error
from ringcore.executor.waiting import drain_event, signal_event, spin_budget_s
from ringcore.executor.wire import STEP_METHOD
from ringcore.executor.worker_calls import perform_call
from ringcore.executor.worker_proc import DEFAULT_FACTORY, create_worker, shut_down
from ringcore.params.field_checks import check_timeout
from ringcore.protocol.codec import encoder
from ringcore.protocol.messages import RankHealth
from ringcore.protocol.steps import ModelRunnerOutput, PendingOutput, SchedulerOutput
from ringcore.worker.rpc import rpc_methods
from ringcore.worker.thread_stacks import thread_stacks

__all__ = ["UniProcExecutor"]

RANK = 0


class UniProcExecutor(Executor):
    """One worker, in the caller's process and thread. Values and errors are those of `MultiprocExecutor`.

    A call cannot be interrupted: one that exceeds its `timeout` finishes first and then raises `RpcTimeoutError`. There
    is no control channel: read-only methods, too, are executed in order; and no watchdog ends a step that hangs.

    Invariant: `_launched` holds the unfinished steps, oldest first. While there are any, the one descriptor of
    `wait_fds` is readable: no event signals the end of device work, so the caller must poll instead of sleeping.
    """

    def __init__(self, config: EngineConfig, *, worker_factory: str = DEFAULT_FACTORY) -> None:
        """`worker_factory` is "module:function", called as (config, 0, None).

        Raises `ConfigError` for more than one rank.
        """
        super().__init__(config)
        size = config.parallel.tensor_parallel_size
        if size != 1:
            raise ConfigError(
                f"tensor_parallel_size={size}: the uniproc executor has one worker; use executor='multiproc'",
                option="tensor_parallel_size",
                value=size,
            )
        self._factory = worker_factory
        self._worker: Any = None
        self._dead: RingcoreError | None = EngineDeadError("the worker was not started; call start()")
        self._is_shut = False
        self._busy: tuple[str, float] | None = None  # the current method, and since when; read by other threads too
        self._num_calls = 0
        self._launched: deque[_Step] = deque()
        self._has_launched_fd: int | None = None  # an eventfd
        self._spin_s = spin_budget_s(1)

    def start(self) -> dict[str, float]:
        assert self._worker is None, "start() was called twice"
        try:
            return self._start()
        except BaseException as error:
            self.shutdown()
            if not isinstance(error, Exception):
                raise
            raise portable_error(error, RANK, "create_worker") from error

    def restart(self) -> dict[str, float]:
        if self._is_shut:
            self._check_alive()
        self._end(EngineDeadError("the worker was replaced", process="worker 0", rank=RANK))
        try:
            return self._start()
        except BaseException as error:
            self._end(EngineDeadError(f"the worker could not be replaced: {error!r}", process="worker 0", rank=RANK))
            if not isinstance(error, Exception):
                raise
            raise portable_error(error, RANK, "create_worker") from error

    def _start(self) -> dict[str, float]:
        phases: dict[str, float] = {}
        self._has_launched_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        with timed(phases, "start_workers"):
            self._worker = create_worker(self._factory, self.config, RANK, None)
        self.methods = rpc_methods(self._worker)
        self._dead, self._num_calls = None, 0
        for method in ("init_device", "load_model"):
            with timed(phases, method):
                reports = self.collective_rpc(method)
            add_parts(phases, method, reports)
        return phases

    def forward(self, call: EncodedCall) -> RpcFuture:
        check_reply_rank(call.unique_reply_rank, 1)
        self._check_alive()
        started = time.monotonic()
        while self._launched:
            self._finish_oldest_step()
        with self._executing(call.method):
            outcome = perform_call(self._worker, RANK, call.head(), call.parts)
        assert outcome is not None, "the only rank must reply"
        if call.timeout is not None and time.monotonic() - started >= call.timeout:
            return _Failed(_too_late(call.method, call.timeout))
        if outcome.is_error:
            return _Failed(joined_error({RANK: decode_error(outcome.parts[0], RANK, call.method)}))
        own: list[Buffer] = [bytes(part) for part in outcome.parts]  # copied: the worker may change what it returned
        return _Value(own, call.method, is_unique=call.unique_reply_rank is not None)

    def execute_model(self, scheduler_output: SchedulerOutput) -> RpcFuture:
        self._check_alive()
        if not self._launched:
            self._busy = STEP_METHOD, time.monotonic()
        step = _Step(self, launch_step(self._worker, scheduler_output))
        self._launched.append(step)
        self.finish_done_steps()
        if self._launched and self._has_launched_fd is not None:
            signal_event(self._has_launched_fd)
        return step

    def finish_done_steps(self) -> None:
        """Settles finished steps, in order."""
        while self._launched and is_done(self._launched[0].pending):
            self._finish_oldest_step()

    def finish_step(self, step: _Step, deadline: float | None) -> None:
        """Settles a step, after all earlier ones. Returns unsettled at `deadline` (monotonic)."""
        while not step.is_settled:
            oldest = self._launched[0].pending
            if not poll_until(partial(is_done, oldest), self._spin_s, deadline):
                return
            self._finish_oldest_step()

    def _finish_oldest_step(self) -> None:
        step = self._launched[0]
        try:
            step.settle(step_result(step.pending))
        except Exception as error:
            step.settle(joined_error({RANK: portable_error(error, RANK, STEP_METHOD)}))
        self._launched.popleft()  # last: an interrupt during the wait must not lose the step
        self._num_calls += 1
        self._busy = (STEP_METHOD, time.monotonic()) if self._launched else None
        if not self._launched and self._has_launched_fd is not None:
            drain_event(self._has_launched_fd)

    @contextmanager
    def _executing(self, method: str) -> Iterator[None]:
        self._busy = method, time.monotonic()
        try:
            yield
        finally:
            self._num_calls += 1
            self._busy = None

    def wait_fds(self) -> list[int]:
        return [] if self._has_launched_fd is None else [self._has_launched_fd]

    def pids(self) -> dict[str, int]:
        return {}

    def check(self) -> None:
        self._check_alive()

    def health(self) -> list[RankHealth]:
        if self._worker is None:
            return []
        busy, pid = self._busy, os.getpid()
        return [
            RankHealth(
                rank=RANK,
                pid=pid,
                process_state=process_state(pid),
                heartbeat_age_s=0.0,  # the caller is this process
                method=busy[0] if busy else None,
                busy_s=time.monotonic() - busy[1] if busy else 0.0,
                num_calls=self._num_calls,
            )
        ]

    def oldest_step_s(self) -> float | None:
        busy = self._busy
        return time.monotonic() - busy[1] if busy is not None and busy[0] == STEP_METHOD else None

    def diagnose(self) -> str:
        lines = [
            f"rank {rank.rank} (this process, pid {rank.pid}): "
            + (f"in {rank.method!r} for {rank.busy_s:.1f} s" if rank.method else "idle")
            + f", {rank.num_calls} calls executed"
            for rank in self.health()
        ]
        return "\n".join([*lines, thread_stacks()]) if lines else "no workers"

    def shutdown(self) -> None:
        self._is_shut = True
        self._end(EngineDeadError("the worker was shut down", process="worker 0", rank=RANK))

    def _end(self, error: EngineDeadError) -> None:
        worker, self._worker = self._worker, None
        self._dead = error
        self._drop_steps(error)
        if worker is not None:
            shut_down(worker)
        fd, self._has_launched_fd = self._has_launched_fd, None
        if fd is not None:
            os.close(fd)

    def _drop_steps(self, error: EngineDeadError) -> None:
        """Waits for the steps on the device, so that the worker may free its memory; their futures get `error`."""
        while self._launched:
            step = self._launched.popleft()
            step.settle(copy.copy(error))
            try:
                step.pending.result()
            except Exception:
                traceback.print_exc(file=sys.stderr)
        self._busy = None

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise copy.copy(self._dead)


class _Value:
    """The `RpcFuture` of a call that succeeded."""

    def __init__(self, parts: list[Buffer], method: str, is_unique: bool) -> None:
        self._parts, self._method, self._is_unique = parts, method, is_unique

    def done(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> Any:
        try:
            value = decode_value(self._parts)
        except Exception as undecodable:
            raise portable_error(undecodable, RANK, self._method) from undecodable
        return value if self._is_unique else [value]

    def encoded_result(self) -> list[list[Buffer]]:
        return [list(self._parts)]


class _Step:
    """The `RpcFuture` of a step: settled, once, with its output or an error."""

    def __init__(self, executor: UniProcExecutor, pending: PendingOutput) -> None:
        self.pending, self.is_settled = pending, False
        self._executor = executor
        self._outcome: ModelRunnerOutput | RingcoreError | None = None

    def settle(self, outcome: ModelRunnerOutput | RingcoreError) -> None:
        self._outcome, self.is_settled = outcome, True

    def done(self) -> bool:
        if not self.is_settled:
            self._executor.finish_done_steps()
        return self.is_settled

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        check_timeout("timeout", timeout)
        if not self.is_settled:
            self._executor.finish_step(self, None if timeout is None else time.monotonic() + timeout)
        match self._outcome:
            case None:
                assert timeout is not None
                raise _too_late(STEP_METHOD, timeout)
            case RingcoreError() as error:
                raise error
            case output:
                return output

    def encoded_result(self) -> list[list[Buffer]]:
        return [[encoder().encode(self.result())]]


class _Failed:
    """The `RpcFuture` of a call that failed."""

    def __init__(self, error: RingcoreError) -> None:
        self._error = error

    def done(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> Any:
        raise self._error

    def encoded_result(self) -> list[list[Buffer]]:
        raise self._error


def _too_late(method: str, timeout_s: float) -> RpcTimeoutError:
    return RpcTimeoutError(
        f"{method!r} took longer than {timeout_s} s; its value is dropped",
        method=method,
        timeout_s=timeout_s,
        missing_ranks=[RANK],
    )
