"""Where the time of the last steps went: a record of each, from which reports and metrics are made for who asks.

A step costs four readings of the clock, a tuple and an append (`benchmarks/introspection.py` measures that),
with metrics or without: their histograms are made of many steps at once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from operator import itemgetter

import numpy as np

from ringcore.engine_core.step_observer import StepRecord
from ringcore.metrics import StepLog, StepMetrics
from ringcore.protocol.introspection import MAX_STEPS, Spread, StepReport

__all__ = ["BATCH", "StepTimes"]

BATCH = 1024  # steps, of which histograms are made at once: numpy adds so many values in the time of some tens
_WINDOW_S = 10.0
_SCHEDULED, _SAMPLED = itemgetter(7), itemgetter(9)  # tokens of a `StepRecord`
_PERCENTILES = (50, 90, 99, 100)


class StepTimes:
    """The last completed steps, `MAX_STEPS` of them at least, and as many sends. now: the engine's clock.

    record, record_send: of a step, and of the seconds of a send. They are the appends of a list and of a deque, called
    without a Python function between. `end_batch` must be called once in about `BATCH` steps.

    Invariant: `_steps` is never empty; before its first step is the one before, or the engine's start. Those before
    index `_num_counted` are in the histograms of `_log`, or were completed before it began.
    """

    record: Callable[[StepRecord], None]
    record_send: Callable[[float], None]

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, start_s = now, now()
        self._steps: list[StepRecord] = [(0, start_s, start_s, start_s, start_s, start_s, 0, 0, 0, 0, 0, 1)]
        self._dropped = 0, 0  # tokens scheduled and sampled of steps that are no longer kept
        self._sends: deque[float] = deque(maxlen=MAX_STEPS)
        self.record, self.record_send = self._steps.append, self._sends.append
        self._log: StepLog | None = None
        self._num_counted = 0

    def end_batch(self) -> None:
        """Drops what is older than the last `MAX_STEPS`."""
        if self._log is not None:
            self._count(self._log)
        surplus = max(0, len(self._steps) - (MAX_STEPS + 1))
        self._dropped = self._tokens_until(surplus)
        del self._steps[:surplus]
        self._num_counted -= surplus

    @property
    def num_tokens(self) -> tuple[int, int]:
        """Scheduled and sampled since the start."""
        return self._tokens_until(len(self._steps))

    def _tokens_until(self, end: int) -> tuple[int, int]:
        """Of the steps before this index too."""
        steps, (num_scheduled, num_sampled) = self._steps[:end], self._dropped
        return num_scheduled + sum(map(_SCHEDULED, steps)), num_sampled + sum(map(_SAMPLED, steps))

    def metrics(self) -> StepMetrics:
        """Histograms of the steps since the first call."""
        if self._log is None:
            self._log, self._num_counted = StepLog(), len(self._steps)
        self._count(self._log)
        return self._log.metrics()

    def _count(self, log: StepLog) -> None:
        log.count(self._steps[self._num_counted - 1 :])
        self._num_counted = len(self._steps)

    def report(self, num_last: int) -> StepReport:
        """With the last `num_last` steps one by one."""
        sends = _spreads({"send": np.array(self._sends)}) if self._sends else {}
        steps = self._steps[-(MAX_STEPS + 1) :]
        num_steps = len(steps) - 1
        if not num_steps:
            return StepReport(0, 0.0, 0.0, 0.0, 0.0, sends)
        now_s, columns = self._now(), np.array(steps, np.float64).T
        seconds = _parts(columns)
        last = {"age_s": now_s - columns[5, 1:]} | {f"{name}_s": part for name, part in seconds.items()}
        last |= {"num_scheduled_tokens": columns[7, 1:], "num_sampled_tokens": columns[9, 1:]}
        first = max(0, num_steps - num_last)
        rows = {name: column[first:].tolist() for name, column in last.items()} if num_last else {}
        return StepReport(num_steps, *_rates(now_s, columns), _spreads(seconds) | sends, rows)


def _parts(columns: np.ndarray) -> dict[str, np.ndarray]:
    """Seconds of each step, [num_steps] each."""
    began, scheduled, launched, taken, applied = columns[1:6, 1:]
    return {
        "step": applied - np.maximum(began, columns[5, :-1]),
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
    applied = columns[5]
    is_full = len(applied) > MAX_STEPS
    window_s = min(_WINDOW_S, now_s - float(applied[0])) if is_full else _WINDOW_S
    first = max(1, int(np.searchsorted(applied, now_s - window_s, "right")))
    num_scheduled, num_sampled = columns[[7, 9], first:].sum(axis=1).tolist()
    per_s = 1 / max(window_s, 1e-9)
    return window_s, num_scheduled * per_s, num_sampled * per_s, (len(applied) - first) * per_s
