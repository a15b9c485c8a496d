"""Async scheduling: the steps in flight, launched before the results of earlier ones are known."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import msgspec

from ringcore.config import SchedulerConfig
from ringcore.engine_core.admin.step_times import BATCH, StepTimes
from ringcore.engine_core.draft_margin import DraftMargin
from ringcore.engine_core.step_observer import StepObserver
from ringcore.engine_core.supervisor import WorkerSupervisor
from ringcore.engine_core.tracing import EngineTracing
from ringcore.executor.base import Executor
from ringcore.executor.rpc_call import RpcFuture
from ringcore.metrics.draft_log import DraftLog
from ringcore.protocol.requests import OutputColumns
from ringcore.protocol.steps import ModelRunnerOutput, SchedulerOutput
from ringcore.scheduler.scheduler import Scheduler
from ringcore.tracing.kinds import STEP

__all__ = ["StepsInFlight"]

_STEP = STEP.number


class StepsInFlight:
    """Schedules steps, has the executor run them and applies the model's output.

    clock: returns seconds.

    Invariant: `_steps` holds the steps submitted to the executor whose output was not applied yet, oldest first, and
    never more than `config.max_steps_in_flight` of them. With `config.short_step_s` a step that would be more than one
    a stage is launched only after one that decodes alone, as the last of these was no longer than that.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        supervisor: WorkerSupervisor,
        config: SchedulerConfig,
        clock: Callable[[], float],
        tracing: EngineTracing,
    ) -> None:
        self._scheduler, self._executor, self._supervisor = scheduler, executor, supervisor
        self._depth, self._clock = config.max_steps_in_flight, clock
        self._num_stages, self._short_s = config.num_stages, config.short_step_s
        self._decode_s = math.inf  # of the last step that decoded alone
        # With each when its scheduling began and ended, and when the workers had it.
        self._steps: deque[tuple[SchedulerOutput, RpcFuture, float, float, float]] = deque()
        self.times = StepTimes(clock)
        self._record, self._record_send = self.times.record, self.times.record_send
        self.observers: list[StepObserver] = []
        tracing.observers = self.observers
        self._num_rows = 0  # of the last completed step
        self.drafts, self._margin = DraftLog(config.max_gain - 1), DraftMargin(self._depth)
        self.num_completed = 0  # steps whose output was applied, or lost with the workers
        self.last_completed_s: float | None = None  # when the last output was applied

    def __len__(self) -> int:
        return len(self._steps)

    def advance(self, block: bool, max_steps: int) -> OutputColumns | None:
        """Keeps `depth` steps in flight and applies the output of the oldest; None if there is no step, or, with
        `block=False`, if its output has not arrived. max_steps: see `Scheduler.schedule`.

        Raises `WorkersLost`; any other error is the scheduler's own and ends the engine.
        """
        while self._has_room() and self._launch_next(max_steps):
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
        taken_s = self._clock()
        self._count_completed(scheduled, model_output, scheduled_s, taken_s)
        columns = self._scheduler.update(scheduled, model_output)
        record = (
            _STEP,
            began_s,
            scheduled_s,
            launched_s,
            taken_s,
            self._clock(),
            scheduled.step,
            scheduled.num_tokens,
            columns.stats.step,
            len(model_output.token_ids),
            self._num_rows,
            scheduled.num_steps,
        )
        self._record(record)
        if not self.num_completed % BATCH:
            self.times.end_batch()
        for observer in tuple(self.observers):  # a trace leaves them at its deadline
            observer.completed(record, columns)
        return columns

    def _has_room(self) -> bool:
        """Whether another step may be in flight."""
        if len(self._steps) >= self._depth:
            return False
        if self._short_s is None or len(self._steps) < self._num_stages:
            return True
        newest, *_ = self._steps[-1]
        return newest.num_scheduled_tokens is None and self._decode_s <= self._short_s

    def _count_completed(
        self, scheduled: SchedulerOutput, output: ModelRunnerOutput, scheduled_s: float, taken_s: float
    ) -> None:
        self.drafts.count(output)
        if scheduled.num_scheduled_tokens is None:  # all rows decode
            # An executor may run it in the launch.
            self._decode_s = seconds = taken_s - max(scheduled_s, self.last_completed_s or 0.0)
            if scheduled.max_gained is not None:
                has_drafts = output.num_drafts is not None and bool(output.num_drafts.any())
                self._margin.record(scheduled.num_tokens, len(output.token_ids), seconds, has_drafts)
        self.last_completed_s = taken_s
        if scheduled.rows is not None:
            self._num_rows = len(scheduled.rows)

    def _launch_next(self, max_steps: int) -> bool:
        """-> whether there was a step to launch."""
        began_s = self._clock()
        scheduled = self._scheduler.schedule(max_steps)
        if scheduled is None:
            return False
        if scheduled.max_gained is not None:
            scheduled = msgspec.structs.replace(scheduled, draft_margin=self._margin.next(len(scheduled.max_gained)))
        scheduled_s = self._clock()
        with self._supervisor.guarded():
            future = self._executor.execute_model(scheduled)
            self._steps.append((scheduled, future, began_s, scheduled_s, self._clock()))
        return True

    def note_send(self, began_s: float, ended_s: float) -> None:
        """Outputs were handed to the client."""
        self._record_send(ended_s - began_s)
        for observer in self.observers:
            observer.sent(began_s, ended_s)

    def discard_lost(self) -> None:
        """Drops the steps in flight of lost workers."""
        self.num_completed += len(self._steps)
        self._steps.clear()

    def clear(self) -> None:
        """Drops the steps in flight at shutdown."""
        self._steps.clear()
