"""Steps that were launched on a device and are finished later: what an executor's worker side does about them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from ringcore.protocol.steps import ModelRunnerOutput, PendingOutput, SchedulerOutput

__all__ = ["StepOver", "is_done", "launch_step", "look_out", "step_result"]

# One spins so many times as long for a device as for a message: 5 ms where each process has a core. Most decoding steps
# end within that.
DEVICE_PATIENCE = 25
NAP_S = 20e-6  # with what the kernel adds, a look every 0.1 ms: 1 to 2% of a core, 1% of a step of 10 ms


class StepOver:
    """The `PendingOutput` of a step that is over already."""

    def __init__(self, output: ModelRunnerOutput | None = None, error: Exception | None = None) -> None:
        self._output, self._error = output, error

    def done(self) -> bool:
        return True

    def result(self) -> ModelRunnerOutput | None:
        if self._error is not None:
            raise self._error
        return self._output


def launch_step(worker: Any, scheduler_output: SchedulerOutput) -> PendingOutput:
    """Has the worker begin a step. What it raises in that is raised by the step's `result`."""
    try:
        output = worker.execute_model(scheduler_output)
    except Exception as error:
        return StepOver(error=error)
    if output is None or isinstance(output, ModelRunnerOutput):
        return StepOver(output)
    pending: PendingOutput = output
    return pending


def is_done(step: PendingOutput) -> bool:
    """Whether `result` would not wait; also where the step cannot even be asked, for `result` to say why."""
    try:
        return step.done()
    except Exception:
        return True


def step_result(step: PendingOutput) -> ModelRunnerOutput:
    """The output of the rank that owes one. Raises whatever the step raised, and TypeError where there is none."""
    output = step.result()
    if output is None:
        raise TypeError("execute_model returned None on the output rank")
    return output


def look_out(
    ready: Callable[[], bool],
    spin_s: float,
    deadline: float | None = None,
    check: Callable[[], None] | None = None,
) -> bool:
    """Looks again and again until `ready()`: no descriptor tells of a device's work. False at `deadline` (monotonic).

    It yields the core between two looks for `DEVICE_PATIENCE` times `spin_s`, and naps between them from then on, with
    a call of `check` before each look, which may raise what ends the wait.
    """
    now = time.monotonic
    began = now()
    while not ready():
        moment = now()
        if deadline is not None and moment >= deadline:
            return False
        if moment - began < DEVICE_PATIENCE * spin_s:
            os.sched_yield()
            continue
        time.sleep(NAP_S)
        if check is not None:
            check()
    return True
