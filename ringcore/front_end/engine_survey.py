"""The state of every engine of this user, asked of all at once; one that does not answer delays none of the others."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Literal

import msgspec

from ringcore.errors import EngineDeadError, RingcoreError
from ringcore.executor.child_stacks import process_state
from ringcore.front_end.admin_client import AdminClient
from ringcore.front_end.local_engines import LocalEngine
from ringcore.protocol.messages import EngineHealth, HealthState

__all__ = ["EngineReport", "EngineState", "silence", "survey"]

# Besides the states that an engine reports: "paused" by a call; "busy": it cannot answer now, and nothing says that it
# will not; "hung".
EngineState = HealthState | Literal["paused", "busy", "hung"]

_SILENT_S = 3.0  # the heartbeat beats once a second


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """owner_pid: of the process that started it. detail: why it is in this state, if that needs saying. age_s: since
    the start of its process. devices: of each rank, e.g. "cuda:0"; empty if the workers did not say. None: not known.
    """

    pid: int
    owner_pid: int | None = None
    engine_id: str
    uid: int
    state: EngineState
    detail: str | None = None
    model: str | None = None
    age_s: float | None = None
    executor: str | None = None
    num_ranks: int | None = None
    devices: list[str] = []
    num_running: int | None = None
    num_waiting: int | None = None
    generated_tokens_per_s: float | None = None  # in the last seconds, as `StepReport` has it
    kv_cache_use: float | None = None
    admin_endpoint: str | None = None


def survey(engines: Sequence[LocalEngine], timeout_s: float) -> list[EngineReport]:
    """A report of each, in this order, within about `timeout_s` seconds. Its calls stop no step."""
    if not engines:
        return []
    with ThreadPoolExecutor(len(engines), thread_name_prefix="survey") as threads:
        return list(threads.map(lambda engine: _look_at(engine, timeout_s), engines))


def _look_at(engine: LocalEngine, timeout_s: float) -> EngineReport:
    deadline = time.monotonic() + timeout_s
    devices: list[str] = []
    tokens_per_s: float | None = None
    try:
        with AdminClient.local(engine, connect_timeout=timeout_s) as admin:
            health = admin.health(_left(deadline))
            with suppress(RingcoreError):  # it answered already
                tokens_per_s = admin.call_engine("step_times", timeout=_left(deadline))["generated_tokens_per_s"]
            with suppress(RingcoreError, KeyError, TypeError):  # workers of one's own may have no such method
                devices = [str(one["device"]) for one in admin.collective_rpc("health", timeout=_left(deadline))]
    except EngineDeadError as error:
        return _report(engine, "dead", error.message)
    except RingcoreError as error:
        return _report(engine, *(silence(engine) or ("hung", error.message)))
    state, detail = _answered(health)
    return msgspec.structs.replace(
        _report(engine, state, detail),
        devices=devices,
        num_running=health.num_running,
        num_waiting=health.num_waiting,
        generated_tokens_per_s=tokens_per_s,
        kv_cache_use=health.kv_cache_use,
    )


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _answered(health: EngineHealth) -> tuple[EngineState, str | None]:
    if health.state == "ready" and health.paused is not None:
        what = "no waiting request starts" if health.paused == "new" else "no step starts"
        return "paused", f"{what} until 'ringcore rpc PID resume'"
    if health.state == "stalled":
        return "stalled", f"a step takes {health.oldest_step_s or 0:.0f} s"
    return health.state, health.error or (health.restart_cause if health.state == "starting" else None)


def silence(engine: LocalEngine) -> tuple[EngineState, str] | None:
    """The state, and why, of an engine that does not answer, from the kernel and its shared memory; None: not known."""
    status, now_ns = engine.status(), time.monotonic_ns()
    if engine.pid is None or status is None:
        return None
    if process_state(engine.pid) == "stopped":
        return "hung", f"the process is stopped; 'kill -CONT {engine.pid}' has it go on"
    if status.num_calls == 0:
        return "starting", "its workers are not ready yet"
    if (silent_s := (now_ns - status.heartbeat_ns) / 1e9) > _SILENT_S:
        return "hung", f"its heartbeat is silent for {silent_s:.0f} s: native code holds the interpreter's lock"
    if status.busy_since_ns is None:
        return "busy", "it replaces its workers, or its own process computes a step"
    return "hung", f"an iteration of its loop has not ended for {(now_ns - status.busy_since_ns) / 1e9:.0f} s"


def _report(engine: LocalEngine, state: EngineState, detail: str | None) -> EngineReport:
    report = EngineReport(
        pid=engine.pid or engine.name.pid, engine_id=engine.engine_id, uid=engine.uid, state=state, detail=detail
    )
    known = engine.description
    if known is None:
        return report
    return msgspec.structs.replace(
        report,
        owner_pid=engine.owner_pid,
        model=known.model,
        age_s=time.monotonic() - known.started_s,
        executor=known.executor,
        num_ranks=known.num_ranks,
        admin_endpoint=known.admin_endpoint,
    )
