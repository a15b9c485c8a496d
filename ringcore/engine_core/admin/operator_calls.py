"""The engine's calls for operators: what it can be asked about itself, and the end of a request by its id.

Every answer is read between two steps, from the books that the engine keeps anyway, and bounded in size. Nothing waits
for a worker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, get_args

from ringcore.config import EngineConfig
from ringcore.engine_core.admin.step_times import StepTimes
from ringcore.errors import InvalidRequestError
from ringcore.host.resources import resident_bytes
from ringcore.host.thread_stacks import thread_stacks
from ringcore.metrics.draft_log import DraftLog
from ringcore.protocol.introspection import (
    MAX_CELLS,
    MAX_REQUESTS,
    MAX_STEPS,
    BlockMap,
    EngineAbout,
    EngineSnapshot,
    RequestList,
    RequestReport,
    RequestState,
    StepReport,
)
from ringcore.protocol.messages import EngineHealth, EngineReady
from ringcore.protocol.requests import EngineCoreOutput
from ringcore.protocol.scopes import Scope
from ringcore.scheduler.scheduler import Scheduler

__all__ = ["OPERATOR_CALLS", "Engine", "Gate", "OperatorCalls"]

# The methods of `OperatorCalls` that can be called by name; the scope that each needs.
OPERATOR_CALLS: Mapping[str, Scope] = {
    "snapshot": "read",
    "about": "read",
    "requests": "read",
    "kv_blocks": "read",
    "step_times": "read",
    "stack": "read",
    "abort": "call",
}
_REQUESTS, _CELLS = 20, 512  # where a call gives no number


class Gate(Protocol):
    """`GrammarGate`, as read here."""

    @property
    def unfinished_ids(self) -> list[str]: ...

    def reports(self, num: int, now_s: float) -> list[RequestReport]: ...


class Engine(Protocol):
    """`EngineCore`, as read here."""

    config: EngineConfig
    ready: EngineReady

    def health(self) -> EngineHealth: ...

    def abort(self, request_ids: Iterable[str]) -> list[EngineCoreOutput]: ...


class OperatorCalls:
    """One engine's. scheduler, times, drafts, gate: its parts. pending_outputs: receives the last outputs of aborted
    requests, for their readers. now: its clock."""

    def __init__(
        self,
        engine: Engine,
        scheduler: Scheduler,
        times: StepTimes,
        drafts: DraftLog,
        gate: Gate,
        pending_outputs: list[EngineCoreOutput],
        now: Callable[[], float],
    ) -> None:
        self._engine, self._scheduler, self._times, self._gate = engine, scheduler, times, gate
        self._pending_outputs, self._now = pending_outputs, now
        self._started_s, self._drafts = now(), drafts

    def snapshot(self, max_requests: int = _REQUESTS, max_cells: int = _CELLS, num_steps: int = 0) -> EngineSnapshot:
        """All of the calls below at one moment, with the engine's health and its counts since the start."""
        stats, (num_scheduled, num_sampled) = self._scheduler.stats(), self._times.num_tokens
        drafts = self._drafts.stats()
        return EngineSnapshot(
            about=self.about(),
            health=self._engine.health(),
            requests=self.requests(max_requests),
            blocks=self.kv_blocks(max_cells),
            steps=self.step_times(num_steps),
            taken_s=self._now(),
            cpu_s=time.process_time(),
            resident_bytes=resident_bytes(),
            num_steps=stats.step,
            num_scheduled_tokens=num_scheduled,
            num_generated_tokens=num_sampled,
            num_preemptions=stats.num_preemptions,
            num_prefix_hit_tokens=stats.num_prefix_hit_tokens,
            num_prefix_query_tokens=stats.num_prefix_query_tokens,
            num_draft_tokens=None if drafts is None else drafts.num_draft_tokens,
            num_accepted_tokens=None if drafts is None else drafts.num_accepted_tokens,
        )

    def about(self) -> EngineAbout:
        """The model, the processes and the limits of the engine."""
        config, ready = self._engine.config, self._engine.ready
        return EngineAbout(
            model=config.model.model,
            device=config.device.device,
            age_s=self._now() - self._started_s,
            pids=ready.pids,
            world_size=config.parallel.layout.world_size,
            num_blocks=ready.num_blocks,
            block_size=ready.block_size,
            max_model_len=ready.max_model_len,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=ready.max_num_batched_tokens,
            steps_in_flight=config.scheduler.max_steps_in_flight,
            scheduling_policy=config.scheduler.scheduling_policy,
        )

    def requests(self, limit: int = _REQUESTS) -> RequestList:
        """How many requests are in each state, and the oldest `limit` (at most 1000) one by one."""
        num, now_s = _checked("limit", limit, MAX_REQUESTS), self._now()
        at_gate = self._gate.reports(num, now_s)
        oldest = sorted([*self._scheduler.view.oldest(num, now_s), *at_gate], key=lambda one: one.age_s, reverse=True)
        counts = self._scheduler.view.num_by_state()
        counts["compiling"] = len(self._gate.unfinished_ids)
        return RequestList({state: counts[state] for state in get_args(RequestState)}, oldest[:num])

    def kv_blocks(self, max_cells: int = _CELLS) -> BlockMap:
        """The KV cache's blocks by use, and a map of them in `max_cells` (at most 4096) cells."""
        return self._scheduler.view.block_map(max(1, _checked("max_cells", max_cells, MAX_CELLS)))

    def step_times(self, num_last: int = 0) -> StepReport:
        """Seconds of the last 1024 steps and of their parts, token rates, and the last `num_last` steps one by one."""
        return self._times.report(_checked("num_last", num_last, MAX_STEPS))

    def stack(self) -> str:
        """The Python stack of every thread of the engine process, between two steps."""
        return thread_stacks()

    def abort(self, request_ids: list[str] | str) -> list[str]:
        """Ends these requests; their readers get a last output with finish reason "abort". -> the unfinished ones."""
        ids = [request_ids] if isinstance(request_ids, str) else request_ids
        if not isinstance(ids, list) or not all(isinstance(one, str) for one in ids):
            raise InvalidRequestError(
                "request_ids: give an id, or a list of them, as `requests` has them", field="request_ids", value=None
            )
        ended = self._engine.abort(ids)
        self._pending_outputs += ended
        return [output.request_id for output in ended]


def _checked(name: str, value: object, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        shown = repr(value)[:100]
        raise InvalidRequestError(f"{name}={shown}: give a number from 0 to {most}", field=name, value=shown)
    return value
