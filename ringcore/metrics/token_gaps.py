"""The seconds between the outputs of each request (inter-token latency)."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

import numpy as np

from ringcore.protocol.requests import StartedRequest

__all__ = ["TokenGaps"]

_NO_GAPS, _NO_COUNTS = np.zeros(0), np.zeros(0, np.int64)


class TokenGaps:
    """Follows the rows of the persistent batch through the messages of an engine, in their order. Not thread-safe.

    While all requests decode, message after message has the same rows: then one gap is that of every row, and many
    messages are one call (`repeat`). Any other message is looked up row by row.

    Invariant: `_last_s[row]` is when the request at `row` last got tokens, or NaN if it has none; for the rows in
    `_rows`, those of the last `tokens`, it is `_time_s`, which `_settle` writes down. `_owners` has the requests that
    have started and not ended. `_parked` has the times of those that were preempted, whose rows belong to others now.
    The requests of an engine that died stay in these, as many as it had rows.
    """

    def __init__(self) -> None:
        self._last_s = np.full(64, np.nan)
        self._rows: np.ndarray | None = None
        self._time_s = 0.0
        self._gaps: list[np.ndarray] = []
        self._counts: list[np.ndarray] = []
        self._owners: dict[int, str] = {}
        self._row_of: dict[str, int] = {}
        self._parked: dict[str, float] = {}

    def start(self, started: Iterable[StartedRequest]) -> None:
        self._settle()
        for one in started:
            if (owner := self._owners.get(one.row)) is not None and owner != one.request_id:
                self._parked[owner] = float(self._last_s[self._row_of.pop(owner)])
            self._grow(one.row + 1)
            self._last_s[one.row] = self._time_before(one) if one.num_preemptions else np.nan
            self._owners[one.row], self._row_of[one.request_id] = one.request_id, one.row

    def tokens(self, rows: np.ndarray, now: float) -> None:
        """rows: [n] int32"""
        if not len(rows):
            return
        self._settle()
        self._add(now - self._last_s[rows])
        self._rows, self._time_s = rows, now

    def repeat(self, times: Sequence[float]) -> None:
        """The rows of the last `tokens` at each of these times, and nothing else between. times: [n], at least one."""
        assert self._rows is not None
        at = np.frombuffer(struct.pack(f"{1 + len(times)}d", self._time_s, *times))
        self._gaps.append(np.diff(at))
        self._counts.append(np.full(len(times), len(self._rows)))
        self._time_s = times[-1]

    def end(self, request_id: str, now: float, *, has_tokens: bool) -> None:
        """Unknown requests (refused before a step) are ignored."""
        self._parked.pop(request_id, None)
        row = self._row_of.pop(request_id, None)
        if row is None:
            return
        self._settle()
        del self._owners[row]
        if has_tokens:
            self._add(now - self._last_s[[row]])

    def __len__(self) -> int:
        return sum(map(len, self._gaps))

    def take(self) -> tuple[np.ndarray, np.ndarray]:
        """The gaps since the last call: seconds, [n] float64, and how often each occurred, [n] int64."""
        taken = np.concatenate([_NO_GAPS, *self._gaps]), np.concatenate([_NO_COUNTS, *self._counts])
        self._gaps, self._counts = [], []
        return taken

    def _add(self, gaps: np.ndarray) -> None:
        gaps = gaps[~np.isnan(gaps)]
        self._gaps.append(gaps)
        self._counts.append(np.ones(len(gaps), np.int64))

    def _time_before(self, resumed: StartedRequest) -> float:
        if resumed.request_id in self._parked:
            return self._parked.pop(resumed.request_id)
        row = self._row_of.get(resumed.request_id)
        if row is None:
            return np.nan
        if row != resumed.row:
            del self._owners[row]
        return float(self._last_s[row])

    def _settle(self) -> None:
        if self._rows is not None:
            self._last_s[self._rows] = self._time_s
            self._rows = None

    def _grow(self, num_rows: int) -> None:
        missing = num_rows - len(self._last_s)
        if missing > 0:
            self._last_s = np.append(self._last_s, np.full(max(missing, len(self._last_s)), np.nan))
