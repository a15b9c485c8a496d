"""Workers in the executor's own process: how their methods are called and what is reported of them."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from ringcore.executor.calls import joined_error
from ringcore.executor.child_stacks import process_state
from ringcore.executor.futures import Failed, Values, too_late
from ringcore.executor.rpc_call import EncodedCall, RpcFuture
from ringcore.executor.value_codec import decode_error
from ringcore.executor.worker_calls import perform_call
from ringcore.host.thread_stacks import thread_stacks
from ringcore.protocol.messages import RankHealth

__all__ = ["call_workers", "report_of", "worker_health"]


def call_workers(workers: Sequence[Any], call: EncodedCall, started: float) -> RpcFuture:
    """Executes a call on each rank's worker, in rank order. It is not interrupted: past its timeout, in seconds since
    `started` (monotonic), it finishes, and its value is dropped."""
    head = call.head()
    outcomes = {rank: perform_call(worker, rank, head, call.parts) for rank, worker in enumerate(workers)}
    if call.timeout_s is not None and time.monotonic() - started >= call.timeout_s:
        return Failed(too_late(call.method, call.timeout_s, range(len(workers))))
    replies = {rank: outcome for rank, outcome in outcomes.items() if outcome is not None}
    errors = {
        rank: decode_error(reply.parts[0], rank, call.method) for rank, reply in replies.items() if reply.is_error
    }
    if errors:
        return Failed(joined_error(errors))
    # Copied: a worker may change what it returned.
    values = {rank: [bytes(part) for part in reply.parts] for rank, reply in replies.items()}
    return Values(values, call.method, is_unique=call.unique_reply_rank is not None)


def worker_health(rank: int, method: str | None, busy_s: float, num_calls: int) -> RankHealth:
    """The health of a worker of this process; the caller is the proof of its heartbeat."""
    pid = os.getpid()
    return RankHealth(rank, pid, process_state(pid), 0.0, method, busy_s, num_calls)


def report_of(ranks: Sequence[RankHealth], where: str) -> str:
    """`Executor.diagnose` of these workers. where: what they are, for a person."""
    lines = [
        f"rank {rank.rank} ({where}, pid {rank.pid}): "
        + (f"in {rank.method!r} for {rank.busy_s:.1f} s" if rank.method else "idle")
        + f", {rank.num_calls} calls executed"
        for rank in ranks
    ]
    return "\n".join([*lines, thread_stacks()]) if lines else "no workers"
