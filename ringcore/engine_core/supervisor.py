"""Supervises an engine's workers: starts them, records when they are lost, replaces them while restarts are left.

    state     lost    dead
    serving   None    None    the executor accepts calls
    lost      cause   None    the workers are unusable; `replace` starts new ones
    dead      any     error   permanent: every call raises the error

Workers are lost when one died or hung (`EngineDeadError`), and when a step failed: the worker's state after it is
unknown, and a device error persists in its process. So a loss always replaces all workers.

The supervisor records a loss when a step or a future raises it; the next call that needs workers replaces them. A
future of lost workers can only raise that its call is lost: whether a worker executed it is unknown.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ringcore.config import EngineConfig
from ringcore.engine_core.start_up import resolve_config, start_up
from ringcore.errors import EngineDeadError, RingcoreError, WorkerDiedError, error_to_wire
from ringcore.executor.base import Executor
from ringcore.executor.ring_buffer import Buffer
from ringcore.executor.rpc_call import RpcFuture
from ringcore.host.owner_process import OwnerProcess
from ringcore.kv_cache.manager import KVCacheManager
from ringcore.protocol.messages import EngineReady, EngineRecovering
from ringcore.protocol.requests import WireError

__all__ = ["WorkerSupervisor", "WorkersLost"]

_log = logging.getLogger(__name__)


class WorkersLost(Exception):
    """The workers are lost and a restart is left; never leaves the engine."""


class WorkerSupervisor:
    """One executor and its successive generations of workers: at most `max_worker_restarts` restarts.

    `on_recovery` is called before each restart, and must not raise.
    """

    def __init__(
        self, config: EngineConfig, executor: Executor, on_recovery: Callable[[EngineRecovering], None] | None
    ) -> None:
        self.owner = OwnerProcess("the engine")
        self.config = config  # resolved once the workers have started
        self._executor, self._on_recovery = executor, on_recovery
        self._max_restarts = config.parallel.max_worker_restarts
        self._max_model_len: int | None = None  # that of the first start; a restart must not raise one that is "auto"
        self._generation = 0  # of workers; a future of an older generation does not report a loss of this one
        self.num_restarts = 0  # failed attempts included
        self.restart_cause: str | None = None  # of the last one
        self.lost: EngineDeadError | None = None
        self.dead: EngineDeadError | None = None

    def start(self) -> tuple[EngineReady, KVCacheManager]:
        phases = self._executor.start()
        self.config = resolve_config(self.config, self._executor)
        ready, kv_cache = start_up(self.config, self._executor, phases)
        self._max_model_len = ready.max_model_len
        return ready, kv_cache

    def check_alive(self) -> None:
        """Raises the cause of the engine's death, and `RingcoreError` in a process that was forked from its own."""
        self.owner.check()
        if self.dead is not None:
            raise self.dead

    def check_serving(self) -> None:
        """Raises the cause of the engine's death, or `WorkersLost`."""
        self.check_alive()
        if self.lost is not None:
            raise WorkersLost

    def end(self, error: EngineDeadError) -> EngineDeadError:
        """Marks the engine dead, with cause `error` unless it has one; returns the cause."""
        if self.dead is None:
            self.dead = error
        return self.dead

    @contextmanager
    def errors_end_the_engine(self) -> Iterator[None]:
        """For code whose errors end the engine: any error becomes the cause of death, raised as `EngineDeadError`."""
        try:
            yield
        except EngineDeadError as error:
            self.end(error)
            raise
        except Exception as error:
            raise self.end(_step_failed(error)) from error

    # -----------------------------------------------------------------------------------------------------------
    # Loss.

    @contextmanager
    def guarded(self, kind: type[Exception] = Exception) -> Iterator[None]:
        """For calls of the executor: an error of this kind means the loss of the workers, raised as `WorkersLost`.

        Raises `EngineDeadError` if no restart is left.
        """
        try:
            yield
        except kind as error:
            self.record_loss(error)
            raise WorkersLost from error

    def record_loss(self, error: Exception) -> None:
        """Records the loss of the workers. If no restart is left the engine is dead: raises `EngineDeadError`."""
        if self.lost is None:
            self._mark_lost(error if isinstance(error, EngineDeadError) else _step_failed(error), error)

    def _mark_lost(self, cause: EngineDeadError, error: Exception) -> None:
        self.check_alive()  # a signal handler may have shut the engine down meanwhile
        if self.num_restarts < self._max_restarts:
            self.lost = cause
            return
        self.dead = self._restarts_exhausted(cause)
        if self.dead is error:
            raise self.dead
        raise self.dead from error

    def _restarts_exhausted(self, cause: EngineDeadError) -> EngineDeadError:
        if self._max_restarts == 0:
            return cause
        return EngineDeadError(
            f"{cause.message}; the workers were restarted {self.num_restarts} times, as often as max_worker_restarts "
            "allows",
            **cause.details,
        )

    # -----------------------------------------------------------------------------------------------------------
    # Restart.

    def replace(self) -> tuple[EngineReady, KVCacheManager]:
        """Starts new workers with an empty cache. A failed attempt counts as a restart and is repeated.

        Raises `EngineDeadError` with the loss and the failure when no restart is left.
        """
        assert self.lost is not None, "the workers are not lost"
        cause = self.lost
        while True:
            self._announce(self.lost)
            try:
                started = start_up(self.config, self._executor, self._executor.restart(), self._max_model_len)
            except Exception as error:
                self._mark_lost(_not_replaced(cause, error), error)
            else:
                break
        self.lost = None
        self._generation += 1
        _log.info("restart %d: the engine has new workers", self.num_restarts)
        return started

    def _announce(self, cause: EngineDeadError) -> None:
        self.num_restarts += 1
        self.restart_cause = cause.message
        _log.error("the workers are lost, restart %d of %d: %s", self.num_restarts, self._max_restarts, cause.message)
        if self._on_recovery is not None:
            self._on_recovery(EngineRecovering(WireError(**error_to_wire(cause)), self.num_restarts))

    # -----------------------------------------------------------------------------------------------------------
    # Calls.

    def watch(self, future: RpcFuture) -> RpcFuture:
        """Wraps a future: it raises `WorkerDiedError` if the workers die before the reply and are replaced."""
        return _WatchedFuture(future, self, self._generation)

    def is_replaced(self, error: EngineDeadError, generation: int) -> bool:
        """Whether the lost workers of this generation are or will be replaced. Raises as `record_loss`."""
        if self.dead is None and generation == self._generation:
            self.record_loss(error)
        return self.dead is None


class _WatchedFuture:
    """The future of a call to one generation of workers."""

    def __init__(self, future: RpcFuture, supervisor: WorkerSupervisor, generation: int) -> None:
        self._future, self._supervisor, self._generation = future, supervisor, generation

    def done(self) -> bool:
        return self._future.done()

    def result(self, timeout: float | None = None) -> Any:
        with self._worker_deaths():
            return self._future.result(timeout)

    def encoded_result(self) -> list[list[Buffer]]:
        with self._worker_deaths():
            return self._future.encoded_result()

    @contextmanager
    def _worker_deaths(self) -> Iterator[None]:
        try:
            yield
        except EngineDeadError as error:
            if not self._supervisor.is_replaced(error, self._generation):
                raise
            raise WorkerDiedError(error.message, **error.details) from error


def _step_failed(error: Exception) -> EngineDeadError:
    return EngineDeadError(f"a step failed: {_text(error)}", **({"process": "engine"} | _details(error)))


def _not_replaced(cause: EngineDeadError, error: Exception) -> EngineDeadError:
    """New workers could not be started. Details: those of the failure, and of the loss where the failure has none."""
    return EngineDeadError(
        f"new workers could not be started: {_text(error)}; the previous ones were lost: {cause.message}",
        **(cause.details | _details(error)),
    )


def _text(error: Exception) -> str:
    return error.message if isinstance(error, RingcoreError) else f"{type(error).__name__}: {error}"


def _details(error: Exception) -> dict[str, Any]:
    return error.details if isinstance(error, RingcoreError) else {}
