"""When experts are placed anew, and what of: with workers that are lists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from ringcore.config.options import ParallelConfig
from ringcore.engine_core.expert_balance import ExpertBalance
from ringcore.engine_core.memory.operations import Operations
from ringcore.engine_core.memory.states import MemoryStates
from ringcore.errors import InvalidRequestError, WorkerDiedError, WorkerError
from ringcore.protocol.expert_placement import ExpertBalanceStats, ExpertLoad, ExpertPlacement

INTERVAL = 10
HOT, EVEN = [10, 90, 10, 10], [5, 5, 5, 5]


class Done:
    """A future with its value, or its error."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def done(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> Any:
        if isinstance(self._value, Exception):
            raise self._value
        return self._value

    def encoded_result(self) -> Any:
        raise AssertionError


class Workers:
    """Two stages of two ranks, each stage with one layer of 4 experts in 6 slots."""

    def __init__(self) -> None:
        self.counts = [HOT, HOT]
        self.placements = [ExpertPlacement.initial(4, 2, 2)] * 2
        self.calls: list[str] = []
        self.error: Exception | None = None
        self.losses: list[Exception] = []

    def submit(self, method: str, args: Sequence[Any]) -> Done:
        self.calls.append(method)
        if method == "expert_loads":
            of_first = [
                [ExpertLoad(counts, list(placement.experts))]
                for counts, placement in zip(self.counts, self.placements, strict=True)
            ]
            return Done(msgspec.to_builtins([of_first[0], [], of_first[1], []]))
        if self.error is not None:
            return Done(self.error)
        stage, layer, experts = args
        assert layer == 0
        self.placements[stage] = ExpertPlacement(tuple(experts), 4, 2)
        return Done([100, 50, 0, 0])

    def lose_workers(self, error: Exception) -> None:
        self.losses.append(error)


class Engine:
    def __init__(self, redundant_experts: int | None = 2) -> None:
        self.workers, self.operations, self.states = Workers(), Operations(lambda: None), MemoryStates()
        self.num_steps = 0
        options: dict[str, Any] = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "expert_parallel": True}
        parallel = ParallelConfig(**options, redundant_experts=redundant_experts, expert_balance_steps=INTERVAL)
        parts = self.workers.submit, self.operations, self.states, self.workers, lambda: self.num_steps
        self.balance = ExpertBalance(parallel, *parts)

    def step(self, number: int = 1) -> list[str]:
        """-> the calls of the workers."""
        for _ in range(number):
            self.num_steps += 1
            self.balance.drive()
            self.operations.drive()
        calls, self.workers.calls = self.workers.calls, []
        return calls

    def interval(self) -> list[str]:
        """The steps until the loads are read, and as many as the operation takes."""
        calls = self.step(INTERVAL - 1)
        while self.operations or not calls:
            calls += self.step()
            assert self.num_steps < 1000
        return calls

    def stats(self) -> ExpertBalanceStats:
        stats = self.balance.stats()
        assert stats is not None
        return stats


def test_hot_experts_are_placed_anew_every_so_many_steps() -> None:
    engine = Engine()
    initial = engine.workers.placements[0].imbalance(HOT)
    assert engine.step(INTERVAL - 1) == []
    assert engine.step() == ["expert_loads", "place_experts"]
    assert engine.step() == ["place_experts"], "a layer a step"
    for placement in engine.workers.placements:
        assert len(placement.slots()[1]) == 2
        assert placement.imbalance(HOT) < initial
    assert engine.stats() == ExpertBalanceStats(initial, initial, 0.75, num_placements=2, moved_bytes=300)
    assert engine.interval() == ["expert_loads"], "as balanced as it can be"
    assert engine.stats().mean_imbalance < initial


def test_even_loads_and_idle_layers_move_nothing() -> None:
    engine = Engine()
    engine.workers.counts = [EVEN, [0, 0, 0, 0]]
    engine.workers.placements = [ExpertPlacement((0, 1, 2, 3, 0, 1), 4, 2)] * 2
    assert engine.interval() == ["expert_loads"]
    assert engine.stats().max_imbalance == engine.workers.placements[0].imbalance(EVEN)


def test_without_redundant_experts_nothing_is_asked() -> None:
    engine = Engine(redundant_experts=None)
    assert engine.step(3 * INTERVAL) == []
    assert engine.balance.stats() is None


@pytest.mark.parametrize("change", ["asleep", "another operation"])
def test_it_waits_for_what_changes_the_memory(change: str) -> None:
    engine = Engine()
    over = [False]

    def other() -> Any:
        yield lambda: over[0]

    end: Callable[[], object]
    if change == "asleep":
        engine.states.confirm({"weights": "offloaded"})
        end = lambda: engine.states.confirm({"weights": "resident"})  # noqa: E731
    else:
        engine.operations.submit("other", other())
        end = lambda: over.__setitem__(0, True)  # noqa: E731
    assert engine.step(2 * INTERVAL) == []
    end()
    assert engine.step(2)[0] == "expert_loads"


def test_ranks_that_may_differ_are_replaced() -> None:
    """A failed move may have reached some ranks; the loss of the workers is seen by others, and no move follows it."""
    engine = Engine()
    engine.workers.error = WorkerError("out of memory", rank=1, error_type="RuntimeError")
    assert engine.interval() == ["expert_loads", "place_experts"]
    assert engine.workers.losses == [engine.workers.error]
    engine.workers.error, engine.workers.losses = WorkerDiedError("it was killed", process="worker 1"), []
    assert engine.interval() == ["expert_loads", "place_experts"]
    assert engine.workers.losses == []
    engine.workers.error = None
    assert engine.interval() == ["expert_loads", "place_experts", "place_experts"]


def test_loads_that_cannot_be_read_are_left(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    submit = engine.workers.submit
    error = InvalidRequestError("no such method", field="method", value="expert_loads")
    engine.balance._submit = lambda method, args: Done(error)
    assert engine.step(INTERVAL) == []
    assert "the loads of experts could not be read" in caplog.text
    engine.balance._submit = submit
    assert engine.interval()[0] == "expert_loads"
