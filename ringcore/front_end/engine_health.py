"""The state of several engines as that of one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from ringcore.protocol.messages import EngineHealth, HealthState
from ringcore.protocol.requests import NO_STATS, EngineStats

__all__ = ["merged_health", "merged_stats"]

# The first that one of the engines is in: what requests meet.
_STATES: tuple[HealthState, ...] = ("ready", "sleeping", "starting", "stalled", "dead")


def merged_health(engines: Sequence[EngineHealth]) -> EngineHealth:
    """One engine's is its own. Requests and restarts are added up, ages are of the oldest; the error and the cause of a
    restart are of the first engine that has one."""
    if len(engines) == 1:
        return engines[0]
    states, shares = {one.state for one in engines}, _known(one.kv_cache_use for one in engines)
    paused = {one.paused for one in engines}
    memory = {
        tag: state for tag, state in engines[0].memory.items() if all(one.memory.get(tag) == state for one in engines)
    }
    return EngineHealth(
        next(state for state in _STATES if state in states),
        step=sum(one.step for one in engines),
        last_step_age_s=min(_known(one.last_step_age_s for one in engines), default=None),
        oldest_step_s=max(_known(one.oldest_step_s for one in engines), default=None),
        oldest_waiting_s=max(_known(one.oldest_waiting_s for one in engines), default=None),
        num_running=sum(one.num_running for one in engines),
        num_waiting=sum(one.num_waiting for one in engines),
        num_restarts=sum(one.num_restarts for one in engines),
        restart_cause=next((one.restart_cause for one in engines if one.restart_cause is not None), None),
        ranks=[rank for one in engines for rank in one.ranks],
        error=next((one.error for one in engines if one.error is not None), None),
        memory=memory,
        paused=paused.pop() if len(paused) == 1 else None,
        kv_cache_use=sum(shares) / len(shares) if shares else None,
    )


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def merged_stats(engines: Sequence[EngineStats]) -> EngineStats:
    """The sums; it sleeps if all do."""
    names = [name for name in EngineStats.__struct_fields__ if name != "is_sleeping"]
    sums = {name: sum(getattr(one, name) for one in engines) for name in names}
    return msgspec.structs.replace(NO_STATS, **sums, is_sleeping=all(one.is_sleeping for one in engines))
