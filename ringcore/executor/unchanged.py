"""Measures for how long a polled value has not changed, excluding the time in which the poller itself did not run."""

from __future__ import annotations

__all__ = ["UnchangedFor"]


class UnchangedFor:
    """The seconds for which a polled value has been the same.

    Of the time between two polls at most `max_gap_s` counts: a poller that was suspended or starved, perhaps with the
    whole machine, does not attribute its own pause to the watched process. None is no value: nothing is counted.
    """

    def __init__(self, max_gap_s: float) -> None:
        self._max_gap_s = max_gap_s
        self._value: object = None
        self._looked_s = 0.0
        self._seconds = 0.0

    def look(self, value: object, now: float) -> float:
        """now: monotonic seconds."""
        if value is None or value != self._value:
            self._seconds = 0.0
        else:
            self._seconds += min(now - self._looked_s, self._max_gap_s)
        self._value, self._looked_s = value, now
        return self._seconds
