"""Watchdog of calls that take too long: logs a report of them, and kills the workers of a step that hangs.

    age of the oldest call in flight      action
    ------------------------------------  --------------------------------------------------------------
    stall_warning_s, 2x, 4x, ...          a warning with `stall_report` in the log
    step_timeout_s, and it is a step      the report in the log, SIGKILL to all workers, `EngineDeadError`
    engine_timeout_s with a rank stopped  the same, for any call, start-up included

Age counts from the end of the previous call, so a step is not blamed for the previous step. An uncollected reply in a
ring means that the caller is late, and not a worker: the watchdog then does nothing.
"""

from __future__ import annotations

import logging
import math
import queue
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from ringcore.config import ParallelConfig
from ringcore.errors import EngineDeadError
from ringcore.executor.calls import Call, CallTable, StepCall
from ringcore.executor.control_thread import BEAT_S
from ringcore.executor.unchanged import UnchangedFor
from ringcore.executor.worker_group import WorkerGroup
from ringcore.protocol.messages import RankHealth

__all__ = ["StallWatch", "stall_report"]

MIN_PERIOD_S = 0.05
_JOIN_S = 2.0
_STALE_S = 5 * BEAT_S
_log = logging.getLogger(__name__)


class StallWatch:
    """The watchdog of one group of workers: a daemon thread, from construction to `stop`.

    It takes no lock of the executor, which may hold it while it waits for the call that hangs, and holds no strong
    reference to the executor or its table.
    """

    def __init__(self, table: CallTable, group: WorkerGroup, config: ParallelConfig) -> None:
        self._table = weakref.ref(table)
        self._group = group
        self._warning_s, self._step_timeout_s = config.stall_warning_s, config.step_timeout_s
        self._stop_timeout_s = config.engine_timeout_s
        limits = (config.stall_warning_s, config.step_timeout_s, config.engine_timeout_s)
        self._period_s = max(MIN_PERIOD_S, min(limit or math.inf for limit in limits) / 4)
        self._stopped = [UnchangedFor(2 * self._period_s) for _ in group.children]  # by rank, during calls
        self._warned: tuple[int, float] = (-1, 0.0)  # the id of the call, and the age at which to warn again
        self._is_stopping = False
        self._inbox: queue.SimpleQueue[None] = queue.SimpleQueue()  # its put is reentrant
        self._thread = threading.Thread(target=self._run, name="stall watch", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Wakes the thread: a call has failed on a rank, and `due` must be signalled when the call is due."""
        self._inbox.put(None)

    def stop(self) -> None:
        """Ends the thread, and cancels a report in progress. Idempotent."""
        self._is_stopping = True
        self._inbox.put(None)
        if threading.current_thread() is not self._thread:  # this thread may drop the executor's last reference
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        next_look = time.monotonic() + self._period_s
        while not self._is_stopping:
            table = self._table()
            if table is None:
                return
            now = time.monotonic()
            if now >= next_look:
                self.look(table)
                next_look = time.monotonic() + self._period_s
            until = self._announce_due(table, next_look)
            del table  # no strong reference while waiting
            try:
                self._inbox.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                continue

    def _announce_due(self, table: CallTable, next_look: float) -> float:
        """Signals `due`, which wakes sleepers on the executor's descriptors, for a call that is due. Returns when to
        call again: repeatedly until the call is settled, since the wake may come shortly before the call is due."""
        due = table.next_due()
        if due is None:
            return next_look
        now = time.monotonic()
        if due > now:
            return min(due, next_look)
        if not self._is_stopping:
            self._group.due.signal()
        return min(now + MIN_PERIOD_S, next_look)

    def look(self, table: CallTable) -> None:
        """One check: logs a warning, or kills the workers, if a limit has passed."""
        calls = table.in_flight()
        stopped_s = self._stopped_seconds(bool(calls))
        if not calls or self._group.killed_for is not None or any(r.has_message() for r in self._group.replies):
            return
        step = next((call for call in calls if isinstance(call, StepCall)), None)
        if step is not None and self._step_timeout_s is not None and table.age_s(step) >= self._step_timeout_s:
            self._kill(table, step, _hung(self._group, step, table.age_s(step)))
            return
        if self._stop_timeout_s is not None and max(stopped_s) >= self._stop_timeout_s:
            self._kill(table, calls[0], _stopped(self._group, calls[0], stopped_s, self._stop_timeout_s))
            return
        call = max(calls, key=table.age_s)
        age = table.age_s(call)
        warn_at = self._warned[1] if self._warned[0] == call.call_id else self._warning_s
        if age < warn_at:
            return
        while warn_at <= age:
            warn_at *= 2
        self._warned = call.call_id, warn_at
        _log.warning("%s", self._report(table))

    def _stopped_seconds(self, is_asked: bool) -> list[float]:
        """Seconds for which each rank has been stopped by a signal while a call was in flight, by rank. A rank that is
        starved, or imports for long, is not stopped."""
        now = time.monotonic()
        states = [rank.process_state for rank in self._group.health()] if is_asked else [""] * len(self._stopped)
        return [
            unchanged.look(state if state == "stopped" else None, now)
            for unchanged, state in zip(self._stopped, states, strict=True)
        ]

    def _kill(self, table: CallTable, call: Call, error: EngineDeadError) -> None:
        """Kills the workers; every current and later wait for them raises this error."""
        report = self._report(table)
        if self._is_stopping or call.is_settled:
            return
        _log.error("%s; the workers are killed\n%s", error.message, report)
        self._group.kill(error)

    def _report(self, table: CallTable) -> str:
        return stall_report(table, self._group, lambda: self._is_stopping)


def _hung(group: WorkerGroup, step: StepCall, age_s: float) -> EngineDeadError:
    """The error of a hung step. It names the ranks that did not finish it. Most may wait for one rank in a collective:
    if process state or heartbeat shows which ranks do not run, it blames only these."""
    unfinished = [rank for rank, status in enumerate(group.statuses()) if not status.has_finished(step.call_id)] or [0]
    ranks = [rank.rank for rank in group.health() if rank.rank in unfinished and _stands_still(rank)] or unfinished
    waiting = [rank for rank in unfinished if rank not in ranks]
    others = f", for which {_ranks(waiting)} waited" if waiting else ""
    return _dead(
        group,
        ranks,
        f"step {step.step} hung: {_ranks(ranks)} did not finish {step.method!r} within {age_s:.1f} s{others} "
        "(raise step_timeout_s if a step may take longer)",
        step=step.step,
        hung_ranks=ranks,
        hung_s=age_s,
    )


def _stands_still(rank: RankHealth) -> bool:
    return rank.process_state not in ("running", "sleeping") or rank.heartbeat_age_s > _STALE_S


def _stopped(group: WorkerGroup, call: Call, stopped_s: Sequence[float], timeout_s: float) -> EngineDeadError:
    ranks = [rank for rank, seconds in enumerate(stopped_s) if seconds >= timeout_s]
    return _dead(
        group,
        ranks,
        f"{_ranks(ranks)} was stopped for {max(stopped_s):.1f} s while {call.method!r} was in flight "
        f"(engine_timeout_s={timeout_s}; raise it if that may take longer, None means never)",
        hung_ranks=ranks,
        hung_s=max(stopped_s),
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _dead(group: WorkerGroup, ranks: Sequence[int], what: str, **details: Any) -> EngineDeadError:
    """The error of the killed workers' death. It names a process if it is a single one."""
    health = group.health()
    children = [group.children[rank] for rank in ranks]
    seen = [
        f"the process {child.name!r} (pid {child.pid}) was {_activity(health[rank])}"
        for rank, child in zip(ranks, children, strict=True)
    ]
    is_one = len(ranks) == 1
    return EngineDeadError(
        f"{what}; {', '.join(seen)}",
        process=children[0].name if is_one else "workers",
        rank=ranks[0] if is_one else None,
        exit_code=None,
        signal="SIGKILL",
        last_log=[line for child in children for line in child.last_log()],
        **details,
    )


def stall_report(table: CallTable, group: WorkerGroup, is_cancelled: Callable[[], bool] = lambda: False) -> str:
    """The calls in flight, and for each rank: its current call, for how long, its process state, the age of its
    heartbeat, and the Python stacks of its threads. Takes up to 0.5 s a rank."""
    calls = table.in_flight()
    names = {call.call_id: _name(call) for call in calls}
    lines = [f"calls in flight: {len(calls)}"]
    if calls:
        oldest = max(calls, key=table.age_s)
        missing = ", ".join(map(str, sorted(oldest.missing))) or "none"
        lines[0] += f"; the oldest, for {table.age_s(oldest):.1f} s, is {_name(oldest)}, missing ranks: {missing}"
    for rank, status, child in zip(group.health(), group.statuses(), group.children, strict=True):
        if is_cancelled():
            break
        doing = "" if rank.method is None else f" ({names.get(status.call_id, f'call {status.call_id}')})"
        lines.append(
            f"rank {rank.rank} (pid {rank.pid}): {_activity(rank)}{doing}, heartbeat {rank.heartbeat_age_s:.1f} s ago, "
            f"{rank.num_calls} calls executed"
        )
        lines.append(textwrap.indent(child.python_stacks(), "    "))
    return "\n".join(lines)


def _name(call: Call) -> str:
    return f"step {call.step}" if isinstance(call, StepCall) else f"{call.method!r} (call {call.call_id})"


def _activity(rank: RankHealth) -> str:
    doing = "idle" if rank.method is None else f"in {rank.method!r} for {rank.busy_s:.1f} s"
    return f"{doing}, {rank.process_state}"
