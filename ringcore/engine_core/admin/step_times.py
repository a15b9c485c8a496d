"""Where the time of the last steps went: a ring of time stamps, from which a report is made only for who asks.

A step costs four readings of the clock, two sums, a tuple and a call (`benchmarks/introspection.py` measures that).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import numpy as np

from ringcore.engine_core.step_observer import Stamps
from ringcore.protocol.introspection import MAX_STEPS, Spread, StepReport
from ringcore.protocol.requests import OutputColumns
from ringcore.protocol.steps import SchedulerOutput

__all__ = ["StepTimes"]

_WINDOW_S = 10.0
_PERCENTILES = (50, 90, 99, 100)


class StepTimes:
    """The last `MAX_STEPS` completed steps and sends: a `StepObserver`. now: the engine's clock.

    Invariant: the ring is never empty; before its first step is the one before, or the engine's start.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, start_s = now, now()
        start: Stamps = (start_s, start_s, start_s, start_s, start_s, 0, 0)
        self._steps: deque[Stamps] = deque([start], maxlen=MAX_STEPS + 1)
        self._sends: deque[float] = deque(maxlen=MAX_STEPS)

    def completed(self, step: SchedulerOutput, stamps: Stamps, columns: OutputColumns) -> None:
        self._steps.append(stamps)

    def sent(self, began_s: float, ended_s: float) -> None:
        self._sends.append(ended_s - began_s)

    @property
    def num_tokens(self) -> tuple[int, int]:
        """Scheduled and sampled since the start."""
        *_, num_scheduled, num_sampled = self._steps[-1]
        return num_scheduled, num_sampled

    def report(self, num_last: int) -> StepReport:
        """With the last `num_last` steps one by one."""
        sends = _spreads({"send": np.array(self._sends)}) if self._sends else {}
        num_steps = len(self._steps) - 1
        if not num_steps:
            return StepReport(0, 0.0, 0.0, 0.0, 0.0, sends)
        now_s, columns = self._now(), np.array(self._steps).T
        seconds = _parts(columns)
        last = {"age_s": now_s - columns[4, 1:]} | {f"{name}_s": part for name, part in seconds.items()}
        last |= {"num_scheduled_tokens": np.diff(columns[5]), "num_sampled_tokens": np.diff(columns[6])}
        first = max(0, num_steps - num_last)
        rows = {name: column[first:].tolist() for name, column in last.items()} if num_last else {}
        return StepReport(num_steps, *_rates(now_s, columns), _spreads(seconds) | sends, rows)


def _parts(columns: np.ndarray) -> dict[str, np.ndarray]:
    """Seconds of each step, [num_steps] each."""
    began, scheduled, launched, taken, applied = columns[:5, 1:]
    return {
        "step": applied - np.maximum(began, columns[4, :-1]),
        "schedule": scheduled - began,
        "launch": launched - scheduled,
        "wait": taken - launched,
        "update": applied - taken,
    }


def _spreads(seconds: dict[str, np.ndarray]) -> dict[str, Spread]:
    """By the name of each part; all have equally many values, at least one."""
    of_parts = np.percentile(np.stack(list(seconds.values())), _PERCENTILES, axis=1).T.tolist()
    return {name: Spread(*of_part) for name, of_part in zip(seconds, of_parts, strict=True)}


def _rates(now_s: float, columns: np.ndarray) -> tuple[float, float, float, float]:
    """The window in seconds; tokens scheduled, tokens sampled and steps a second in it."""
    applied = columns[4]
    is_full = len(applied) > MAX_STEPS
    window_s = min(_WINDOW_S, now_s - float(applied[0])) if is_full else _WINDOW_S
    first = max(1, int(np.searchsorted(applied, now_s - window_s, "right")))
    num_scheduled, num_sampled = (columns[5:, -1] - columns[5:, first - 1]).tolist()
    per_s = 1 / max(window_s, 1e-9)
    return window_s, num_scheduled * per_s, num_sampled * per_s, (len(applied) - first) * per_s
