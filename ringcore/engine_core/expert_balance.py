"""Places the experts of a mixture anew, now and then, by how many tokens each had."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from ringcore.config.options import ParallelConfig
from ringcore.engine_core.expert_placing import balanced_placement
from ringcore.engine_core.memory.operations import Operations, Steps
from ringcore.engine_core.memory.states import MemoryStates
from ringcore.errors import EngineDeadError, RingcoreError
from ringcore.executor.rpc_call import RpcFuture
from ringcore.protocol.expert_placement import ExpertBalanceStats, ExpertLoad, ExpertPlacement

__all__ = ["ExpertBalance"]

_log = logging.getLogger(__name__)
_MIN_GAIN = 0.05  # of the imbalance, for which weights are moved


class _Workers(Protocol):
    """`RequestGate`, as used here."""

    def lose_workers(self, error: Exception) -> None: ...


class ExpertBalance:
    """An operation every `expert_balance_steps` steps: it reads the loads of all layers, and moves the experts of one
    after the other, each by one call between two steps. So no sleep, wake-up or weight update falls between.

    The workers have the placement: new ones begin with the initial one, and nothing here need know.
    """

    def __init__(
        self,
        parallel: ParallelConfig,
        submit: Callable[[str, Sequence[Any]], RpcFuture],
        operations: Operations,
        states: MemoryStates,
        workers: _Workers,
        num_steps: Callable[[], int],
    ) -> None:
        """submit: calls a worker method, given its name and arguments. num_steps: completed so far."""
        self._layout, self._submit, self._operations = parallel.layout, submit, operations
        self._states, self._workers, self._num_steps = states, workers, num_steps
        self._interval = None if parallel.redundant_experts is None else parallel.expert_balance_steps
        self._began_at = 0  # a number of steps
        self._stats = ExpertBalanceStats()

    def drive(self) -> None:
        """Begins an operation where it is time for one, and none is in progress. Never waits."""
        if self._interval is None or self._num_steps() - self._began_at < self._interval:
            return
        if not self._operations and self._states.serves:
            self._began_at = self._num_steps()
            self._operations.submit("expert balance", self._steps())

    def stats(self) -> ExpertBalanceStats | None:
        """None where the experts stay where they are."""
        return None if self._interval is None else self._stats

    def _steps(self) -> Steps:
        try:
            ranks = msgspec.convert((yield self._submit("expert_loads", [])), list[list[ExpertLoad]])
        except EngineDeadError:  # with the loss of the workers, which the engine sees itself
            return
        except RingcoreError:
            _log.warning("the loads of experts could not be read; they stay where they are", exc_info=True)
            return
        size = self._layout.ranks_per_stage
        layers = [
            (stage, index, load.counts, ExpertPlacement(tuple(load.experts), len(load.counts), size))
            for stage in range(self._layout.num_stages)
            for index, load in enumerate(ranks[stage * size])
        ]
        self._note([(counts, placement) for _, _, counts, placement in layers])
        for stage, index, counts, current in layers:
            yield iter((False, True)).__next__  # the engine steps between: a placement takes some milliseconds
            placed = balanced_placement(counts, current)
            if current.imbalance(counts) - placed.imbalance(counts) >= _MIN_GAIN:
                yield from self._move(stage, index, placed)

    def _move(self, stage: int, index: int, placed: ExpertPlacement) -> Steps:
        try:
            moved: list[int] = yield self._submit("place_experts", [stage, index, list(placed.experts)])
        except EngineDeadError:
            raise
        except Exception as error:  # some ranks may have moved theirs, and others not
            self._workers.lose_workers(error)
            raise
        stats = self._stats
        self._stats = msgspec.structs.replace(
            stats, num_placements=stats.num_placements + 1, moved_bytes=stats.moved_bytes + sum(moved)
        )

    def _note(self, layers: Sequence[tuple[Sequence[int], ExpertPlacement]]) -> None:
        seen = [(counts, placement) for counts, placement in layers if any(counts)]
        if not seen:
            return
        imbalances = [placement.imbalance(counts) for counts, placement in seen]
        self._stats = msgspec.structs.replace(
            self._stats,
            mean_imbalance=sum(imbalances) / len(imbalances),
            max_imbalance=max(imbalances),
            hottest_share=max(max(counts) / sum(counts) for counts, _ in seen),
        )
