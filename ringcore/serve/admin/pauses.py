"""Pausing every engine, as vLLM's /pause does: what runs is ended, finished or kept."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from ringcore.errors import RpcTimeoutError
from ringcore.front_end.engine_calls import EngineCalls
from ringcore.front_end.serving_engine import ServingEngine
from ringcore.protocol.messages import SleepMode
from ringcore.serve.admin.replica_answers import AdminCalls

__all__ = ["abort_requests", "pause_all"]

_POLL_S = 0.02
_HEALTH_S = 5.0


async def pause_all(
    engine: ServingEngine, calls: AdminCalls, mode: SleepMode, clear_cache: bool, timeout_s: float
) -> dict[int, bool]:
    """-> whether each replica has emptied its prefix cache. Raises `PartlyFailedError`; a replica that answered is
    paused then too."""
    deadline = time.monotonic() + timeout_s
    await calls.each(lambda one: one.pause("new" if mode == "wait" else "all", timeout_s))
    if mode == "keep":
        return await calls.each(_nothing_cleared)
    if mode == "abort":
        await abort_requests(engine, None)

    async def drain(one: EngineCalls) -> bool:
        await _until_none_runs(one, deadline, timeout_s)
        return clear_cache and await one.reset_prefix_cache(timeout=timeout_s)

    return await calls.each(drain)


async def abort_requests(engine: ServingEngine, ids: Sequence[str] | None) -> list[str]:
    """Ends unfinished requests of these ids, or of answers that have these ids; None: all. -> the ids of the engine's
    requests."""
    unfinished = engine.unfinished_ids
    wanted = None if ids is None else set(ids)
    ended = [one for one in unfinished if wanted is None or not wanted.isdisjoint((one, _answer_id(one)))]
    for one in ended:
        await engine.abort(one)
    return ended


def _answer_id(request_id: str) -> str:
    """Of an answer with several prompts, whose requests have the prompt's number at the end."""
    answer_id, _, number = request_id.rpartition("-")
    return answer_id if number.isdecimal() else request_id


async def _nothing_cleared(_: EngineCalls) -> bool:
    return False


async def _until_none_runs(one: EngineCalls, deadline: float, timeout_s: float) -> None:
    while (num_running := (await one.health(_HEALTH_S)).num_running) > 0:
        if time.monotonic() > deadline:
            raise RpcTimeoutError(
                f"pause: {num_running} requests still run after {timeout_s} s, and no other one starts; wait again, "
                "give mode='abort', or POST /resume",
                method="pause",
                timeout_s=timeout_s,
                missing_ranks=[],
            )
        await asyncio.sleep(_POLL_S)
