"""One replica of a set: an engine that is replaced when it dies, and its calls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from ringcore.errors import RingcoreError
from ringcore.front_end.client import EngineCoreClient
from ringcore.front_end.daemon_threads import DaemonThreads
from ringcore.front_end.engine_calls import EngineCalls
from ringcore.front_end.engine_generations import EngineGenerations
from ringcore.front_end.engine_metrics import EngineMetrics
from ringcore.front_end.input_processor import PreparedRequest
from ringcore.front_end.request_streams import RequestStream
from ringcore.protocol.messages import EngineHealth

__all__ = ["Replica"]

T = TypeVar("T")


class Replica(EngineCalls):
    """generations: its engines, one after the other."""

    def __init__(self, number: int, generations: EngineGenerations, calls: DaemonThreads) -> None:
        self.number, self.generations = number, generations
        self.metrics = EngineMetrics.of_generations(generations)
        self._calls = calls

    # -----------------------------------------------------------------------------------------------------------
    # Requests.

    @property
    def is_open(self) -> bool:
        """Whether a request would be sent at once."""
        return self.generations.is_open

    @property
    def is_awake(self) -> bool:
        return not self.generations.current.client.stats.is_sleeping

    @property
    def num_updates(self) -> int:
        """Of the weights since its engine was started with those of the checkpoint."""
        return self.generations.current.client.num_weight_updates

    @property
    def num_unfinished(self) -> int:
        return len(self.generations.current.unfinished_ids)

    @property
    def num_used_blocks(self) -> int:
        """Of the KV cache, as last reported."""
        client = self.generations.current.client
        return 0 if client.last_ready is None else client.last_ready.num_blocks - client.stats.num_free_blocks

    def has(self, request_id: str) -> bool:
        return request_id in self.generations.current.unfinished_ids

    def add(self, prepared: PreparedRequest) -> RequestStream:
        """As `RequestStreams.add`, where it is open."""
        return self.generations.current.add(prepared)

    async def wait_open(self) -> None:
        """Raises the error that ended it."""
        (await self.generations.opened()).check_open()

    # -----------------------------------------------------------------------------------------------------------
    # Calls.

    async def in_thread(self, function: Callable[[], T]) -> T:
        self.generations.owner.check()
        return await asyncio.wrap_future(self._calls.submit(function))

    async def _each(self, method: Callable[[EngineCoreClient], T]) -> list[T]:
        return [await self.in_thread(partial(method, self.generations.current.client))]

    async def health(self, timeout: float = 1.0) -> EngineHealth:
        return await self.in_thread(partial(self.generations.health, timeout))

    async def restart(self, timeout: float | None) -> None:
        """Replaces the engine, also one that is dead, once its requests have ended; returns when the new one is ready.
        Raises the error of its start."""
        with suppress(RingcoreError):  # it ended: the next one may not
            await self.generations.opened()
        await self.in_thread(partial(self.generations.replace, timeout))
        await self.wait_open()
