"""The executor with its one worker in this process: nothing is sent, a call is done when it is submitted."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ringcore.config import EngineConfig
from ringcore.errors import ConfigError, EngineDeadError, RingcoreError, RpcTimeoutError
from ringcore.executor.base import EncodedCall, Executor, RpcFuture, check_reply_rank
from ringcore.executor.calls import joined_error
from ringcore.executor.child_stacks import process_state
from ringcore.executor.ring_buffer import Buffer
from ringcore.executor.timing import timed
from ringcore.executor.value_codec import decode_error, decode_value, portable_error
from ringcore.executor.wire import CALL, CALLABLE, STEP_METHOD, CallHead
from ringcore.executor.worker_calls import perform_call
from ringcore.executor.worker_proc import DEFAULT_FACTORY, create_worker, shut_down
from ringcore.protocol import ModelRunnerOutput, RankHealth, SchedulerOutput, encoder
from ringcore.worker.thread_stacks import thread_stacks

__all__ = ["UniProcExecutor"]

RANK = 0


class UniProcExecutor(Executor):
    """One worker, in the caller's process and thread. Values and errors are those of `MultiprocExecutor`.

    A call cannot be interrupted: one that outlasts its `timeout` is finished first and raises `RpcTimeoutError` then.
    Nor can it be overtaken: a read-only method, too, is executed when its turn comes; and no step is ended for hanging.
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
        self._busy: tuple[str, float] | None = None  # what is executed, and since when; another thread may look
        self._num_calls = 0

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
        with timed(phases, "start_workers"):
            self._worker = create_worker(self._factory, self.config, RANK, None)
        self._dead, self._num_calls = None, 0
        for method in ("init_device", "load_model"):
            with timed(phases, method):
                self.collective_rpc(method)
        return phases

    def forward(self, call: EncodedCall) -> RpcFuture:
        check_reply_rank(call.unique_reply_rank, 1)
        self._check_alive()
        head = CallHead(0, CALLABLE if call.is_callable else CALL, call.unique_reply_rank, call.method)
        started = time.monotonic()
        with self._executing(call.method):
            outcome = perform_call(self._worker, RANK, head, call.parts)
        assert outcome is not None, "the one rank there is owes the value"
        if call.timeout is not None and time.monotonic() - started >= call.timeout:
            return _Failed(_too_late(call.method, call.timeout))
        if outcome.is_error:
            return _Failed(joined_error({RANK: decode_error(outcome.parts[0], RANK, call.method)}))
        own: list[Buffer] = [bytes(part) for part in outcome.parts]  # the worker may change what it returned
        return _Value(own, call.method, is_unique=call.unique_reply_rank is not None)

    def execute_model(self, scheduler_output: SchedulerOutput) -> RpcFuture:
        self._check_alive()
        try:
            with self._executing(STEP_METHOD):
                output = self._worker.execute_model(scheduler_output)
            if output is None:
                raise TypeError("execute_model returned None on the output rank")
        except Exception as error:
            return _Failed(joined_error({RANK: portable_error(error, RANK, STEP_METHOD)}))
        return _StepOutput(output)

    @contextmanager
    def _executing(self, method: str) -> Iterator[None]:
        self._busy = method, time.monotonic()
        try:
            yield
        finally:
            self._num_calls += 1
            self._busy = None

    def wait_fds(self) -> list[int]:
        return []

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
                heartbeat_age_s=0.0,  # who asks is the process
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
        if worker is not None:
            shut_down(worker)

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise copy.copy(self._dead)


class _Value:
    """The `RpcFuture` of a call that went well."""

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


class _StepOutput:
    """The `RpcFuture` of a step that went well."""

    def __init__(self, output: ModelRunnerOutput) -> None:
        self._output = output

    def done(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        return self._output

    def encoded_result(self) -> list[list[Buffer]]:
        return [[encoder().encode(self._output)]]


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
