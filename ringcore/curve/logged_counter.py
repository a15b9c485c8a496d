"""Counters of what foreign peers do, logged at a bounded rate."""

from __future__ import annotations

import logging
import math
import time

__all__ = ["LoggedCounter"]

_LOG_EVERY_S = 1.0

_log = logging.getLogger(__name__)


class LoggedCounter:
    """A counter that is logged at most once a second."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._last = ""
        self._num_logged = 0
        self._logged_s = -math.inf
        self.num = 0

    def add(self, last: str) -> None:
        self.num += 1
        self._last = last
        if time.monotonic() - self._logged_s >= _LOG_EVERY_S:
            self.log()

    def log(self) -> None:
        """Logs the number of events since the last log line, if there are any."""
        if self.num > self._num_logged:
            _log.warning(self._text, self.num - self._num_logged, self._last)
            self._num_logged, self._logged_s = self.num, time.monotonic()
