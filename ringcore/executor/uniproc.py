"""The executor with its one worker in this process: no messages, a call is executed when it is submitted.

A step may only be launched then (`PendingOutput`): it is finished when its future is polled, or before the next call.
"""

from __future__ import annotations

import copy
import logging
import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from ringcore.config import EngineConfig
from ringcore.errors import ConfigError, EngineDeadError, RingcoreError
from ringcore.executor.base import Executor
from ringcore.executor.calls import joined_error
from ringcore.executor.futures import StepInProcess
from ringcore.executor.in_process import call_workers, report_of, worker_health
from ringcore.executor.launched_steps import is_done, launch_step, poll_until, step_result
from ringcore.executor.rpc_call import EncodedCall, RpcFuture, check_reply_rank
from ringcore.executor.timing import add_parts, timed
from ringcore.executor.value_codec import portable_error
from ringcore.executor.waiting import drain_event, signal_event, spin_budget_s
from ringcore.executor.wire import STEP_METHOD
from ringcore.executor.worker_proc import DEFAULT_FACTORY, create_worker, shut_down
from ringcore.protocol.messages import RankHealth
from ringcore.protocol.steps import PendingOutput, SchedulerOutput
from ringcore.worker.rpc import rpc_methods

__all__ = ["UniProcExecutor"]

RANK = 0
_log = logging.getLogger(__name__)


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
        size = config.parallel.layout.world_size
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
            return call_workers([self._worker], call, started)

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
        method, since = self._busy or (None, 0.0)
        busy_s = 0.0 if method is None else time.monotonic() - since
        return [worker_health(RANK, method, busy_s, self._num_calls)]

    def oldest_step_s(self) -> float | None:
        busy = self._busy
        return time.monotonic() - busy[1] if busy is not None and busy[0] == STEP_METHOD else None

    def diagnose(self) -> str:
        return report_of(self.health(), "this process")

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
                _log.exception("a step of a worker that ends has failed")
        self._busy = None

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise copy.copy(self._dead)


class _Step(StepInProcess):
    """A step that the worker has launched."""

    def __init__(self, executor: UniProcExecutor, pending: PendingOutput) -> None:
        super().__init__(RANK)
        self.pending = pending
        self._executor = executor

    def _poll(self) -> None:
        self._executor.finish_done_steps()

    def _wait(self, timeout: float | None) -> None:
        self._executor.finish_step(self, None if timeout is None else time.monotonic() + timeout)
