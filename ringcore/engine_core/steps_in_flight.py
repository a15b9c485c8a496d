"""Async scheduling: the steps in flight, launched before the results of earlier ones are known."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from ringcore.engine_core.admin.step_times import StepTimes
from ringcore.engine_core.supervisor import WorkerSupervisor
from ringcore.engine_core.tracing import EngineTracing
from ringcore.executor.base import Executor
from ringcore.executor.rpc_call import RpcFuture
from ringcore.protocol.requests import OutputColumns
from ringcore.protocol.steps import SchedulerOutput
from ringcore.scheduler.scheduler import Scheduler
from ringcore.tracing.kinds import STEP

__all__ = ["StepObserver", "StepsInFlight"]


class StepObserver(Protocol):
    """A member of `StepsInFlight.observers`. Its methods must be fast, and must not raise."""

    def launched(self, step: SchedulerOutput) -> None:
        """The executor has another step."""
        ...

    def completed(self, now: float) -> None:
        """The oldest step's output has come. now: by the clock of `StepsInFlight`"""
        ...

    def lost(self) -> None:
        """All steps in flight are lost with the workers."""
        ...


class StepsInFlight:
    """Schedules steps, has the executor run them and applies the model's output.

    depth: maximum number of steps in flight. clock: returns seconds.

    Invariant: `_steps` holds the steps submitted to the executor whose output was not applied yet, oldest first, and
    never more than `depth` of them.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        supervisor: WorkerSupervisor,
        depth: int,
        clock: Callable[[], float],
        tracing: EngineTracing,
    ) -> None:
        self._scheduler, self._executor, self._supervisor = scheduler, executor, supervisor
        self._tracing, self._tracer = tracing, tracing.tracer
        self._depth, self._clock = depth, clock
        self.observers: list[StepObserver] = []
        # With each when its scheduling began and ended, and when the workers had it.
        self._steps: deque[tuple[SchedulerOutput, RpcFuture, float, float, float]] = deque()
        self.times = StepTimes(clock)
        self._num_scheduled = self._num_sampled = 0  # tokens of completed steps
        self.num_completed = 0  # steps whose output was applied, or lost with the workers
        self.last_completed_s: float | None = None  # when the last output was applied

    def __len__(self) -> int:
        return len(self._steps)

    def advance(self, block: bool, max_steps: int) -> OutputColumns | None:
        """Keeps `depth` steps in flight and applies the output of the oldest; None if there is no step, or, with
        `block=False`, if its output has not arrived. max_steps: see `Scheduler.schedule`.

        Raises `WorkersLost`; any other error is the scheduler's own and ends the engine.
        """
        while len(self._steps) < self._depth and self._launch_next(max_steps):
            continue
        if not self._steps:
            assert not self._scheduler.has_unfinished or self._scheduler.loading.in_flight, (
                "unfinished requests and nothing to schedule"
            )
            return None
        scheduled, future, began_s, scheduled_s, launched_s = self._steps[0]
        if not block and not future.done():
            return None
        with self._supervisor.guarded():
            model_output = future.result()
        self._steps.popleft()  # only now: an interrupt while waiting must not lose the step
        self.num_completed += 1
        taken_s = self.last_completed_s = self._clock()
        for observer in self.observers:
            observer.completed(taken_s)
        columns = self._scheduler.update(scheduled, model_output)
        self._num_scheduled += scheduled.num_tokens
        self._num_sampled += len(model_output.token_ids)
        ended_s = self._clock()
        stamps = began_s, scheduled_s, launched_s, taken_s, ended_s, self._num_scheduled, self._num_sampled
        self.times.add(stamps)
        if self._tracer.is_on:
            times_ns = began_s * 1e9, scheduled_s * 1e9, launched_s * 1e9, taken_s * 1e9, ended_s * 1e9
            self._tracer.record(STEP.number, *times_ns, scheduled.step, scheduled.num_tokens, columns.stats.step)
            if columns.started or columns.others or self._tracing.awaited:
                self._tracing.note(columns, int(ended_s * 1e9))
        return columns

    def _launch_next(self, max_steps: int) -> bool:
        """-> whether there was a step to launch."""
        began_s = self._clock()
        scheduled = self._scheduler.schedule(max_steps)
        if scheduled is None:
            return False
        scheduled_s = self._clock()
        with self._supervisor.guarded():
            future = self._executor.execute_model(scheduled)
            self._steps.append((scheduled, future, began_s, scheduled_s, self._clock()))
        for observer in self.observers:
            observer.launched(scheduled)
        return True

    def discard_lost(self) -> None:
        """Drops the steps in flight of lost workers."""
        self.num_completed += len(self._steps)
        self._steps.clear()
        for observer in self.observers:
            observer.lost()

    def clear(self) -> None:
        """Drops the steps in flight at shutdown."""
        self._steps.clear()
