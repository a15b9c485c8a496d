"""Where the time of the last steps went: a ring of time stamps, from which a report is made only for who asks.

A step costs four readings of the clock and one tuple (`benchmarks/introspection.py` measures that).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ringcore.protocol.introspection import MAX_STEPS, Spread, StepReport

__all__ = ["Launch", "StepTimes"]

_WINDOW_S = 10.0
_PERCENTILES = (50, 90, 99, 100)


class Launch(NamedTuple):
    """A step that the workers have: seconds of the engine's clock."""

    began_s: float
    scheduled_s: float
    launched_s: float


class StepTimes:
    """The last `MAX_STEPS` completed steps and sends, and totals since the start. now: the engine's clock."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self.num_scheduled_tokens = 0
        self.num_sampled_tokens = 0
        # (began, scheduled, launched, output taken, applied) in seconds, tokens scheduled, tokens sampled
        self._steps: deque[tuple[float, float, float, float, float, int, int]] = deque(maxlen=MAX_STEPS)
        self._sends: deque[float] = deque(maxlen=MAX_STEPS)
        self.add_send = self._sends.append  # seconds

    def add(self, launch: Launch, taken_s: float, num_scheduled_tokens: int, num_sampled_tokens: int) -> None:
        """A step whose output was just applied."""
        self.num_scheduled_tokens += num_scheduled_tokens
        self.num_sampled_tokens += num_sampled_tokens
        self._steps.append((*launch, taken_s, self.now(), num_scheduled_tokens, num_sampled_tokens))

    def report(self, num_last: int) -> StepReport:
        """With the last `num_last` steps one by one."""
        sends = {"send": _spread(np.array(self._sends))} if self._sends else {}
        if not self._steps:
            return StepReport(0, 0.0, 0.0, 0.0, 0.0, sends)
        now_s, columns = self.now(), np.array(self._steps).T
        seconds = _parts(columns)
        spreads = {name: _spread(part) for name, part in seconds.items()}
        last = {"age_s": now_s - columns[4]} | {f"{name}_s": part for name, part in seconds.items()}
        last |= {"num_scheduled_tokens": columns[5], "num_sampled_tokens": columns[6]}
        first = max(0, len(self._steps) - num_last)
        rows = {name: column[first:].tolist() for name, column in last.items()} if num_last else {}
        return StepReport(len(self._steps), *_rates(now_s, columns), spreads | sends, rows)


def _parts(columns: np.ndarray) -> dict[str, np.ndarray]:
    """Seconds of each step, [num_steps] each."""
    began, scheduled, launched, taken, applied = columns[:5]
    since = np.maximum(began, np.concatenate((began[:1], applied[:-1])))
    return {
        "step": applied - since,
        "schedule": scheduled - began,
        "launch": launched - scheduled,
        "wait": taken - launched,
        "update": applied - taken,
    }


def _spread(seconds: np.ndarray) -> Spread:
    p50, p90, p99, highest = np.percentile(seconds, _PERCENTILES).tolist()
    return Spread(p50, p90, p99, highest)


def _rates(now_s: float, columns: np.ndarray) -> tuple[float, float, float, float]:
    """The window in seconds; tokens scheduled, tokens sampled and steps a second in it."""
    applied, num_scheduled, num_sampled = columns[4:]
    is_full = len(applied) == MAX_STEPS
    window_s = min(_WINDOW_S, now_s - applied[0]) if is_full else _WINDOW_S
    is_recent = applied > now_s - window_s  # of a full ring not the oldest one, which began before the window
    counts = num_scheduled[is_recent].sum(), num_sampled[is_recent].sum(), np.count_nonzero(is_recent)
    tokens, sampled, steps = (float(count) / max(window_s, 1e-9) for count in counts)
    return float(window_s), tokens, sampled, steps
