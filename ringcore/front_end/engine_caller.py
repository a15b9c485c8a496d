"""What every client of an engine process can call: its workers, and the engine itself."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from ringcore.executor.rpc_call import RpcCaller, WorkerCall

__all__ = ["EngineCaller"]


class EngineCaller(RpcCaller):
    """A client, which has calls answered by the engine (`target="engine"`) or by every worker (`target="workers"`)."""

    @abstractmethod
    def _call(self, target: str, call: WorkerCall) -> list[Any]:
        """Calls and waits for the values, one per reply."""

    def call_workers(self, call: WorkerCall) -> Any:
        values = self._call("workers", call)
        return values if call.unique_reply_rank is None else values[0]

    def call_engine(
        self,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> Any:
        """Calls the engine itself: the methods of target "engine" that `methods` lists. Those such as "pause" or
        "stats" do not wait for a step, operations such as "sleep" do. Raises as `collective_rpc`."""
        (value,) = self._call("engine", WorkerCall(method, args, kwargs, timeout_s=timeout))
        return value
