"""The administration of one engine, or of several alike: every call of `EngineCoreClient`, awaited."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from msgspec.structs import replace

from ringcore.executor.rpc_call import RpcCaller, WorkerCall
from ringcore.front_end.client import EngineCoreClient
from ringcore.front_end.engine_trace import Recording
from ringcore.protocol.messages import EngineHealth, MemoryReport, PauseMode, SleepMode
from ringcore.protocol.methods import RpcMethod

__all__ = ["EngineCalls"]

T = TypeVar("T")


class EngineCalls(RpcCaller, ABC):
    """Each method is that of `LLM` (or `EngineCore`) of the same name. Cancelling a call cancels the wait for it.

    Of several engines, a list with a value per rank has those of engine 0 first, and where one rank replies it is a
    list with the value of each engine; a report has the ranks of all engines, and an answer is True if all say so.
    """

    @abstractmethod
    async def _each(self, method: Callable[[EngineCoreClient], T]) -> list[T]:
        """Calls every engine, each in a thread of its own, and returns when all have answered. Raises the error of the
        first one that failed."""

    async def call_workers(self, call: WorkerCall) -> Any:
        values = await self._each(lambda client: client.call_workers(call))
        if len(values) == 1:
            return values[0]
        return values if call.unique_reply_rank is not None else [value for of_engine in values for value in of_engine]

    async def methods(self) -> list[RpcMethod]:
        return (await self._each(EngineCoreClient.methods))[0]

    @abstractmethod
    async def health(self, timeout: float = 1.0) -> EngineHealth:
        """Within about `timeout` seconds. Never raises for an engine that is dead or silent."""

    async def reset_prefix_cache(self, preempt_running: bool = False, timeout: float | None = None) -> bool:
        return all(await self._each(lambda client: client.reset_prefix_cache(preempt_running, timeout)))

    async def pause(self, mode: PauseMode = "new", timeout: float | None = None) -> None:
        await self._each(lambda client: client.pause(mode, timeout))

    async def resume(self, timeout: float | None = None) -> None:
        await self._each(lambda client: client.resume(timeout))

    async def is_sleeping(self, timeout: float | None = None) -> bool:
        return all(await self._each(lambda client: client.is_sleeping(timeout)))

    async def start_trace(self, seconds: float, operators: bool = False) -> list[Recording]:
        """Begins a trace of each engine, which its recording ends; by itself it ends after `seconds`."""
        return await self._each(lambda client: Recording(client, seconds, operators))

    async def sleep(self, level: int = 1, mode: SleepMode = "abort", timeout: float | None = None) -> MemoryReport:
        return await self._reported(lambda client: client.sleep(level, mode, timeout))

    async def wake_up(self, tags: Sequence[str] | None = None, timeout: float | None = None) -> MemoryReport:
        return await self._reported(lambda client: client.wake_up(tags, timeout))

    async def start_weight_update(self, mode: SleepMode = "keep", timeout: float | None = None) -> MemoryReport:
        return await self._reported(lambda client: client.start_weight_update(mode, timeout))

    async def update_weights(
        self, weights: str | os.PathLike[str] | Mapping[str, Any], timeout: float | None = None
    ) -> MemoryReport:
        return await self._reported(lambda client: client.update_weights(weights, timeout))

    async def finish_weight_update(self, timeout: float | None = None) -> MemoryReport:
        return await self._reported(lambda client: client.finish_weight_update(timeout))

    async def reload_weights(
        self, path: str | os.PathLike[str], mode: SleepMode = "keep", timeout: float | None = None
    ) -> MemoryReport:
        return await self._reported(lambda client: client.reload_weights(path, mode, timeout))

    async def _reported(self, method: Callable[[EngineCoreClient], MemoryReport]) -> MemoryReport:
        first, *others = await self._each(method)
        states = {tag: state for tag, state in first.states.items() if all(one.states[tag] == state for one in others)}
        seconds = max(one.seconds for one in (first, *others))
        ranks = [rank for one in (first, *others) for rank in one.ranks]
        return replace(first, states=states, seconds=seconds, ranks=ranks)
