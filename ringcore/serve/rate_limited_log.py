"""Rate limiting of repeated log warnings."""

from __future__ import annotations

import logging
import time

__all__ = ["RateLimitedLog"]


class RateLimitedLog:
    """One kind of warning. The first is logged at once; the next line has the count of those of the next `period_s`."""

    def __init__(self, log: logging.Logger, period_s: float) -> None:
        self._log = log
        self._period_s = period_s
        self._num_since = 0
        self._quiet_until = 0.0

    def warning(self, text: str) -> None:
        self._num_since += 1
        now = time.monotonic()
        if now < self._quiet_until:
            return
        self._log.warning("%s (%d since the last line)", text, self._num_since)
        self._num_since, self._quiet_until = 0, now + self._period_s
