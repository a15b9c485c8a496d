"""The steps of an engine: how long each took, and what it computed."""

from __future__ import annotations

import msgspec
import numpy as np

from ringcore.metrics.histogram import BucketHistogram, HistogramCounts
from ringcore.protocol.requests import OutputColumns
from ringcore.protocol.steps import SchedulerOutput
from ringcore.protocol.stored_kv import StoredKVStats

__all__ = ["StepLog", "StepMetrics"]

_SECONDS = tuple(m * 10**e for e in range(-4, 1) for m in (1.0, 2.0, 5.0))  # 0.1 ms to 5 s
_TOKENS = tuple(float(1 << e) for e in range(15))  # 1 to 16384
_REQUESTS = tuple(float(1 << e) for e in range(13))  # 1 to 4096
_MAX_ENTRIES = 512  # numpy adds so many values in the time of some tens

# Its launch and the arrival of its output in seconds, its tokens, its rows (None: those of the step before), and its
# number of steps.
_Step = tuple[float, float, int, np.ndarray | None, int]


class StepMetrics(msgspec.Struct, frozen=True):
    """Histograms of the steps since the log began."""

    seconds: HistogramCounts
    tokens: HistogramCounts  # prompt tokens and others
    requests: HistogramCounts  # the batch size
    stored_kv: StoredKVStats | None = None  # with a store beyond the device


class StepLog:
    """Counts steps. It observes `StepsInFlight`, whose thread makes every call.

    A step begins when it is launched, or when the one before it completes, if that is later: with steps in flight the
    times add up to the time in which the engine had work.
    """

    def __init__(self) -> None:
        self._steps: list[_Step] = []
        self._last_s = 0.0  # when the last step completed, of those that are counted
        self._num_rows = 0  # of that step
        self._seconds = BucketHistogram(_SECONDS)
        self._tokens = BucketHistogram(_TOKENS)
        self._requests = BucketHistogram(_REQUESTS)

    def completed(self, step: SchedulerOutput, stamps: tuple[float, ...], columns: OutputColumns) -> None:
        """stamps: as `engine_core.step_observer.Stamps`."""
        self._steps.append((stamps[2], stamps[3], step.num_tokens, step.rows, step.num_steps))
        if len(self._steps) >= _MAX_ENTRIES:
            self._count()

    def sent(self, began_s: float, ended_s: float) -> None:
        """Not counted."""

    def metrics(self) -> StepMetrics:
        self._count()
        return StepMetrics(self._seconds.snapshot(), self._tokens.snapshot(), self._requests.snapshot())

    def _count(self) -> None:
        if not self._steps:
            return
        launched_s, completed_s, tokens, rows, times = map(list, zip(*self._steps, strict=True))
        num_times, before_s = np.array(times), np.array([self._last_s, *completed_s[:-1]])
        self._seconds.add((completed_s - np.maximum(before_s, launched_s)) / num_times, num_times)
        self._tokens.add(np.array(tokens) / num_times, num_times)
        self._requests.add([self._rows_of(one) for one in rows], num_times)
        self._last_s = completed_s[-1]
        self._steps.clear()

    def _rows_of(self, rows: np.ndarray | None) -> int:
        """Of the next step; None: as many as the one before."""
        if rows is not None:
            self._num_rows = len(rows)
        return self._num_rows
