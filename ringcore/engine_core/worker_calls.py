"""Calls to an engine's workers: if the workers are lost, they are replaced before the call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import msgspec

from ringcore.engine_core.supervisor import WorkersLost, WorkerSupervisor
from ringcore.errors import EngineDeadError
from ringcore.executor.base import Executor
from ringcore.executor.rpc_call import EncodedCall, RpcFuture, WorkerCall
from ringcore.params.structured_outputs import StructuredOutputsParams

__all__ = ["WorkerCalls"]

_TIMEOUT_S = 1800.0  # of the engine's own calls; reading new weights may take long

T = TypeVar("T")


class WorkerCalls:
    """Every method raises `EngineDeadError` if the workers are lost and no restart is left.

    recover: replaces the lost workers.
    """

    def __init__(self, executor: Executor, supervisor: WorkerSupervisor, recover: Callable[[], None]) -> None:
        self._executor, self._supervisor, self._recover = executor, supervisor, recover

    def forward(self, call: EncodedCall) -> RpcFuture:
        """`Executor.forward` of a client's call; its `by_engine` is overridden. The future raises `WorkerDiedError` if
        the workers die before the reply and are replaced."""
        return self._forward(msgspec.structs.replace(call, by_engine=False))

    def _forward(self, call: EncodedCall) -> RpcFuture:
        return self._supervisor.watch(self._with_workers(lambda: self._executor.forward(call)))

    def submit(self, method: str, args: Sequence[Any] = (), timeout_s: float = _TIMEOUT_S) -> RpcFuture:
        """`forward` of a call of the engine's own."""
        return self._forward(WorkerCall(method, args, timeout_s=timeout_s).encoded(by_engine=True))

    def compile_grammar(self, spec: StructuredOutputsParams, timeout_s: float) -> RpcFuture:
        return self.submit("compile_grammar", [asdict(spec)], timeout_s)

    def check(self) -> None:
        """Detects a worker that died while idle."""
        self._with_workers(self._executor.check)

    def wait_fds(self) -> list[int]:
        """`Executor.wait_fds`."""
        return self._with_workers(self._executor.wait_fds)

    def _with_workers(self, call: Callable[[], T]) -> T:
        """Calls the executor; if it raises that the workers are lost, replaces them and repeats the call."""
        while True:
            try:
                self._supervisor.check_serving()
                with self._supervisor.guarded(EngineDeadError):
                    return call()
            except WorkersLost:
                self._recover()
