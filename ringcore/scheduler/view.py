"""What can be asked about a scheduler's requests between two steps; it changes nothing, and costs a step nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import islice

import numpy as np

from ringcore.protocol.introspection import MAX_ID_CHARS, BlockMap, RequestReport, RequestState
from ringcore.scheduler.loading import LoadingRequests
from ringcore.scheduler.quarantine import Quarantine
from ringcore.scheduler.request import Request, RequestStatus
from ringcore.scheduler.running import RunningRequests

__all__ = ["SchedulerView", "report_of"]

_STATES: Mapping[RequestStatus, RequestState] = {
    RequestStatus.WAITING: "waiting",
    RequestStatus.RUNNING: "running",
    RequestStatus.PREEMPTED: "preempted",
}


class SchedulerView:
    """requests: all unfinished ones, in the order of their arrival at the scheduler."""

    def __init__(
        self,
        requests: Mapping[str, Request],
        running: RunningRequests,
        quarantine: Quarantine,
        loading: LoadingRequests,
    ) -> None:
        self._requests, self._running, self._quarantine, self._loading = requests, running, quarantine, loading

    def oldest_waiting_s(self, now_s: float) -> float | None:
        """The longest time that a request waits for a row, since it arrived or was preempted; seconds."""
        since = [request.waiting_since_s for request in self._requests.values() if request.row is None]
        return max(now_s - min(since), 0.0) if since else None

    def num_by_state(self) -> Counter[RequestState]:
        return Counter(map(self._state_of, self._requests.values()))

    def oldest(self, num: int, now_s: float) -> list[RequestReport]:
        """The first `num` of them."""
        requests = list(islice(self._requests.values(), num))
        rows = np.array([request.row for request in requests if request.row is not None], np.int64)
        num_blocks = self._running.kv_cache.occupancy.num_blocks_of(rows)
        by_row = dict(zip(rows.tolist(), num_blocks.tolist(), strict=True))
        return [self._report(request, by_row, now_s) for request in requests]

    def block_map(self, max_cells: int) -> BlockMap:
        per_cell, counts = self._running.kv_cache.occupancy.count_cells(max_cells)
        num_free, num_cached, num_used, num_shared = counts.sum(axis=0).tolist()
        num_blocks = num_free + num_cached + num_used + num_shared
        cells = [tuple(cell) for cell in counts.tolist()]
        return BlockMap(num_blocks, num_free, num_cached, num_used, num_shared, per_cell, cells)

    def _state_of(self, request: Request) -> RequestState:
        if request in self._loading:
            return "loading"
        return "held" if request in self._quarantine and request.row is None else _STATES[request.status]

    def _report(self, request: Request, num_blocks: Mapping[int, int], now_s: float) -> RequestReport:
        state = self._state_of(request)
        if request.row is None:
            return report_of(request, state, now_s)
        table = self._running.table
        position = table.position_of(request)
        known, computed = int(table.known[position]), int(table.computed[position])
        return report_of(request, state, now_s, known, computed, num_blocks[request.row])


def report_of(
    request: Request,
    state: RequestState,
    now_s: float,
    num_tokens: int | None = None,
    num_computed_tokens: int = 0,
    num_blocks: int = 0,
) -> RequestReport:
    """num_tokens: known ones; None: those that it brings to its next start."""
    num_tokens = len(request.tokens) if num_tokens is None else num_tokens
    first_s = request.first_scheduled_s
    return RequestReport(
        request_id=_cut(request.request_id),
        state=state,
        age_s=max(0.0, now_s - request.arrival_s),
        waiting_s=max(0.0, now_s - request.waiting_since_s) if request.row is None else None,
        first_scheduled_s=None if first_s is None else max(0.0, first_s - request.arrival_s),
        num_prompt_tokens=request.num_prompt_tokens,
        num_generated_tokens=num_tokens - request.num_prompt_tokens,
        max_generated_tokens=request.max_total_tokens - request.num_prompt_tokens,
        num_computed_tokens=num_computed_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_blocks=num_blocks,
        priority=request.priority,
        num_preemptions=request.num_preemptions,
    )


def _cut(request_id: str) -> str:
    return request_id if len(request_id) <= MAX_ID_CHARS else f"{request_id[: MAX_ID_CHARS - 1]}…"
