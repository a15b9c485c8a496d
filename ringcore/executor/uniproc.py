"""The executor with its one worker in this process: nothing is sent, a call is done when it is submitted."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any

from ringcore.config import EngineConfig
from ringcore.errors import ConfigError, EngineDeadError, RingcoreError, RpcTimeoutError
from ringcore.executor.base import Executor, RpcFuture
from ringcore.executor.timing import timed
from ringcore.executor.value_codec import decode_error, decode_value, encode_request, portable_error
from ringcore.executor.worker_proc import DEFAULT_FACTORY, create_worker, perform_call, shut_down
from ringcore.protocol import SchedulerOutput

__all__ = ["UniProcExecutor"]

RANK = 0


class UniProcExecutor(Executor):
    """One worker, in the caller's process and thread. Values and errors are those of `MultiprocExecutor`.

    A call cannot be interrupted: one that outlasts its `timeout` is finished first and raises `RpcTimeoutError` then.
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

    def start(self) -> dict[str, float]:
        assert self._worker is None, "start() was called twice"
        phases: dict[str, float] = {}
        try:
            with timed(phases, "start_workers"):
                self._worker = create_worker(self._factory, self.config, RANK, None)
            self._dead = None
            for method in ("init_device", "load_model"):
                with timed(phases, method):
                    self.collective_rpc(method)
        except BaseException as error:
            self.shutdown()
            if not isinstance(error, Exception):
                raise
            raise portable_error(error, RANK, "create_worker") from error
        return phases

    def submit(
        self, method: str, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None, timeout: float | None = None
    ) -> RpcFuture:
        request = encode_request(method, args, kwargs)
        self._check_alive()
        started = time.monotonic()
        outcome = perform_call(self._worker, RANK, request)
        if timeout is not None and time.monotonic() - started >= timeout:
            return _Done(None, _too_late(method, timeout))
        if outcome.is_error:
            return _Done(None, decode_error(outcome.body, RANK, method))
        return _Done([decode_value(outcome.body)])

    def execute_model(self, scheduler_output: SchedulerOutput) -> RpcFuture:
        self._check_alive()
        try:
            output = self._worker.execute_model(scheduler_output)
            if output is None:
                raise TypeError("execute_model returned None on the output rank")
        except Exception as error:
            return _Done(None, portable_error(error, RANK, "execute_model"))
        return _Done(output)

    def wait_fds(self) -> list[int]:
        return []

    def pids(self) -> dict[str, int]:
        return {}

    def shutdown(self) -> None:
        worker, self._worker = self._worker, None
        self._dead = EngineDeadError("the worker was shut down", process="worker 0", rank=RANK)
        if worker is not None:
            shut_down(worker)

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise copy.copy(self._dead)


class _Done:
    """The `RpcFuture` of a call that is over."""

    def __init__(self, value: Any, error: RingcoreError | None = None) -> None:
        self._value, self._error = value, error

    def done(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> Any:
        if self._error is not None:
            raise self._error
        return self._value


def _too_late(method: str, timeout_s: float) -> RpcTimeoutError:
    return RpcTimeoutError(
        f"{method!r} took longer than {timeout_s} s; its value is dropped",
        method=method,
        timeout_s=timeout_s,
        missing_ranks=[RANK],
    )
