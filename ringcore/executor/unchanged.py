"""For how long a value has not changed, by a clock that stops while its reader is suspended."""

from __future__ import annotations

__all__ = ["UnchangedFor"]


class UnchangedFor:
    """The seconds for which a value has been the same, from one look to the next.

    Of the time between two looks at most `max_gap_s` counts: a reader that was suspended or starved, perhaps with the
    whole machine, does not blame another process for its own absence. None is no value, and counts as 0 seconds.
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
