"""An engine's health report, made without a call to its workers."""

from __future__ import annotations

from ringcore.engine_core.memory.states import MemoryStates
from ringcore.engine_core.steps_in_flight import StepsInFlight
from ringcore.engine_core.supervisor import WorkerSupervisor
from ringcore.executor.base import Executor
from ringcore.protocol.messages import EngineHealth, HealthState
from ringcore.scheduler.scheduler import Scheduler

__all__ = ["engine_health"]


def engine_health(
    scheduler: Scheduler,
    steps: StepsInFlight,
    executor: Executor,
    supervisor: WorkerSupervisor,
    memory: MemoryStates,
    num_blocks: int,
    now: float,
) -> EngineHealth:
    """num_blocks: usable ones. now: seconds, on the clock of `steps` and of the requests. Never waits, never raises."""
    stats, dead, last_step_s = scheduler.stats(), supervisor.dead, steps.last_completed_s
    oldest_step_s = None if dead else executor.oldest_step_s()
    return EngineHealth(
        state=_state(supervisor, memory, oldest_step_s),
        step=stats.step,
        last_step_age_s=None if last_step_s is None else now - last_step_s,
        oldest_step_s=oldest_step_s,
        oldest_waiting_s=scheduler.view.oldest_waiting_s(now),
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        num_restarts=supervisor.num_restarts,
        restart_cause=supervisor.restart_cause,
        ranks=[] if dead else executor.health(),
        error=dead.message if dead else None,
        memory=memory.as_dict(),
        paused=scheduler.paused,
        kv_cache_use=1 - stats.num_free_blocks / num_blocks if num_blocks else None,
    )


def _state(supervisor: WorkerSupervisor, memory: MemoryStates, oldest_step_s: float | None) -> HealthState:
    """The first state that applies, the gravest first."""
    if supervisor.dead is not None:
        return "dead"
    if supervisor.lost is not None:
        return "starting"
    if not memory.serves:
        return "sleeping"
    stalls = oldest_step_s is not None and oldest_step_s > supervisor.config.parallel.stall_warning_s
    return "stalled" if stalls else "ready"
