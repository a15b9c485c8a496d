"""The steps that an engine's workers are at."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ringcore.engine_core.supervisor import WorkerSupervisor
from ringcore.executor.base import Executor, RpcFuture
from ringcore.protocol.requests import OutputColumns
from ringcore.protocol.steps import SchedulerOutput
from ringcore.scheduler.scheduler import Scheduler

__all__ = ["StepsInFlight"]


class StepsInFlight:
    """Schedules steps, has them executed and takes their results in.

    depth: how many steps the workers may have at once. clock: gives seconds.

    Invariant: `_steps` holds the steps handed to the executor whose results were not taken in, oldest first, and never
    more than `depth` of them.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        supervisor: WorkerSupervisor,
        depth: int,
        clock: Callable[[], float],
    ) -> None:
        self._scheduler, self._executor, self._supervisor = scheduler, executor, supervisor
        self._depth, self._clock = depth, clock
        self._steps: deque[tuple[SchedulerOutput, RpcFuture]] = deque()
        self.num_taken = 0  # steps whose results were taken in, or lost with the workers
        self.last_taken_s: float | None = None  # when the last result was taken in

    def __len__(self) -> int:
        return len(self._steps)

    def take(self, block: bool, max_steps: int) -> OutputColumns | None:
        """Keeps `depth` steps with the workers and takes in the result of the oldest; None where there is no step, or,
        with `block=False`, where the result is not there yet. max_steps: see `Scheduler.schedule`.

        Raises `WorkersLost`; any other error is the scheduler's own, which cannot be survived.
        """
        while len(self._steps) < self._depth:
            scheduled = self._scheduler.schedule(max_steps)
            if scheduled is None:
                break
            with self._supervisor.guarded():
                self._steps.append((scheduled, self._executor.execute_model(scheduled)))
        if not self._steps:
            assert not self._scheduler.has_unfinished, "unfinished requests and nothing to schedule"
            return None
        scheduled, future = self._steps[0]
        if not block and not future.done():
            return None
        with self._supervisor.guarded():
            model_output = future.result()
        self._steps.popleft()  # only now: an interrupt while waiting must not lose the step
        self.num_taken += 1
        self.last_taken_s = self._clock()
        return self._scheduler.update(scheduled, model_output)

    def lose(self) -> None:
        """The workers are lost, and these steps with them."""
        self.num_taken += len(self._steps)
        self._steps.clear()

    def clear(self) -> None:
        """At the engine's end: nobody takes these steps in."""
        self._steps.clear()
