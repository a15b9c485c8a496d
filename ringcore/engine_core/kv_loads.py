"""Learns from the workers which loads of stored KV have ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ringcore.engine_core.steps_in_flight import StepsInFlight
from ringcore.errors import WorkerDiedError
from ringcore.executor.rpc_call import RpcFuture
from ringcore.protocol.stored_kv import LevelCounts, LoadReport, StoredKVStats
from ringcore.scheduler.scheduler import Scheduler

__all__ = ["KVLoads"]

_IDLE_WAIT_S = 1e-3  # that a worker waits for the end of a load while no step is in flight


class KVLoads:
    """Asks the workers for loads in flight: one call at a time, at most one for each completed step.

    submit: calls a worker method, given its name and arguments.
    """

    def __init__(
        self, scheduler: Scheduler, submit: Callable[[str, Sequence[Any]], RpcFuture], steps: StepsInFlight
    ) -> None:
        self._scheduler, self._submit, self._steps = scheduler, submit, steps
        self._future: RpcFuture | None = None
        self._asked: list[int] = []
        self._levels = LevelCounts()  # of all ranks
        self._asked_at = -1  # the number of completed steps

    def __bool__(self) -> bool:
        """Whether a load is in flight."""
        return bool(self._scheduler.loading.in_flight)

    def drive(self) -> None:
        """Never waits. Raises `EngineDeadError` if the workers are lost and not replaced."""
        if self._future is None:
            self._ask()
        if self._future is None or not self._future.done():
            return
        future, self._future = self._future, None
        try:
            reports = msgspec.convert(future.result(), list[LoadReport])
        except WorkerDiedError:
            return  # the scheduler begins again with new workers
        self._levels = sum((report.levels for report in reports), LevelCounts())
        in_flight = self._scheduler.loading.in_flight
        of_loads = zip(*(report.results for report in reports), strict=True)
        for number, of_ranks in zip(self._asked, of_loads, strict=True):
            known = [one for one in of_ranks if one is not None]
            if number in in_flight and len(known) == len(of_ranks):
                self._scheduler.finish_load(number, [all(block) for block in zip(*known, strict=True)])

    def _ask(self) -> None:
        numbers, num_in_flight = self._scheduler.loading.in_flight, len(self._steps)
        if not numbers or (num_in_flight and self._asked_at == self._steps.num_completed):
            return
        self._asked, self._asked_at = numbers, self._steps.num_completed
        self._future = self._submit("finished_kv_loads", [numbers, 0.0 if num_in_flight else _IDLE_WAIT_S])

    def workers_replaced(self) -> None:
        """Their answers mean nothing any more."""
        self._future, self._levels = None, LevelCounts()

    def stats(self) -> StoredKVStats | None:
        """None without a store."""
        stats = self._scheduler.loading.stats()
        return None if stats is None else msgspec.structs.replace(stats, levels=self._levels)
