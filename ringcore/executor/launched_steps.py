"""Asynchronously launched steps (`PendingOutput`): launching, polling and finishing them on the worker side."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from ringcore.protocol.steps import ModelRunnerOutput, PendingOutput, SchedulerOutput

__all__ = ["FinishedStep", "is_done", "launch_step", "poll_until", "step_result"]

# Spin for a device so many times as long as for a message: 5 ms if each process has its own core. Most decode steps end
# within that.
DEVICE_SPIN_FACTOR = 25
POLL_SLEEP_S = 20e-6  # with timer slack a poll every 0.1 ms: 1 to 2% of a core, 1% of a step of 10 ms


class FinishedStep:
    """The `PendingOutput` of a step that has finished already."""

    def __init__(self, output: ModelRunnerOutput | None = None, error: Exception | None = None) -> None:
        self._output, self._error = output, error

    def done(self) -> bool:
        return True

    def result(self) -> ModelRunnerOutput | None:
        if self._error is not None:
            raise self._error
        return self._output


def launch_step(worker: Any, scheduler_output: SchedulerOutput) -> PendingOutput:
    """Launches a step on the worker. An error in the launch is raised by the step's `result`."""
    try:
        output = worker.execute_model(scheduler_output)
    except Exception as error:
        return FinishedStep(error=error)
    if output is None or isinstance(output, ModelRunnerOutput):
        return FinishedStep(output)
    pending: PendingOutput = output
    return pending


def is_done(step: PendingOutput) -> bool:
    """Whether `result` would not wait; also True if `done` raises: `result` then raises the reason."""
    try:
        return step.done()
    except Exception:
        return True


def step_result(step: PendingOutput) -> ModelRunnerOutput:
    """The output of the output rank. Raises the step's error, and TypeError if there is no output."""
    output = step.result()
    if output is None:
        raise TypeError("execute_model returned None on the output rank")
    return output


def poll_until(
    ready: Callable[[], bool],
    spin_s: float,
    deadline: float | None = None,
    check: Callable[[], None] | None = None,
) -> bool:
    """Polls until `ready()`: no descriptor signals the end of device work. False at `deadline` (monotonic).

    Yields the core between two polls for `DEVICE_SPIN_FACTOR` times `spin_s`, then sleeps between them and calls
    `check` before each poll, which may raise to end the wait.
    """
    now = time.monotonic
    began = now()
    while not ready():
        moment = now()
        if deadline is not None and moment >= deadline:
            return False
        if moment - began < DEVICE_SPIN_FACTOR * spin_s:
            os.sched_yield()
            continue
        time.sleep(POLL_SLEEP_S)
        if check is not None:
            check()
    return True
