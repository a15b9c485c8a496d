"""The seam between the engine and its workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from ringcore.config import EngineConfig
from ringcore.protocol import SchedulerOutput

__all__ = ["Executor", "RpcFuture"]


class RpcFuture(Protocol):
    """A call under way."""

    def done(self) -> bool:
        """Whether `result` would return (or raise) at once. Takes in what has arrived; never blocks."""
        ...

    def result(self, timeout: float | None = None) -> Any:
        """The call's value. Ends on the result, the death of a worker, or the deadline, whichever is first.

        Raises the error of a rank, `EngineDeadError`, or `RpcTimeoutError`.
        """
        ...


class Executor(ABC):
    """Starts the workers of one engine and calls their methods.

    Every call is one broadcast and a gather of replies in rank order. Calls are executed by each worker in the
    order in which they were submitted. `timeout` is in seconds from the submission; None waits for result or death.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config

    @abstractmethod
    def start(self) -> dict[str, float]:
        """Starts every worker and returns when all have their device and model. Raises what stopped a worker.

        Returns the seconds of its phases, in order: "start_workers", "init_device", "load_model".
        """

    @abstractmethod
    def submit(
        self, method: str, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None, timeout: float | None = None
    ) -> RpcFuture:
        """Broadcasts a call; the future's result is a list, one value a rank.

        Values arrive as builtins, whatever they were; `msgspec.convert` makes a type of them again.
        """

    @abstractmethod
    def execute_model(self, scheduler_output: SchedulerOutput) -> RpcFuture:
        """Broadcasts a step; the future's result is the output rank's `ModelRunnerOutput`."""

    def collective_rpc(
        self, method: str, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None, timeout: float | None = None
    ) -> list[Any]:
        return list(self.submit(method, args, kwargs, timeout).result())

    @abstractmethod
    def wait_fds(self) -> list[int]:
        """Descriptors that become readable when a future may have completed or a worker has died."""

    @abstractmethod
    def pids(self) -> dict[str, int]:
        """The processes by name, e.g. {"worker 0": 4711}; empty where the worker lives in this one."""

    @abstractmethod
    def shutdown(self) -> None:
        """Ends the workers and frees what they held. Idempotent; pending futures raise `EngineDeadError`."""
