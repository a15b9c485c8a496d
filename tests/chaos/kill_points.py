"""The named points of the kill matrix: where one process has got to when another, or itself, is killed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from chaos_plan import FRONT_END, INTERPRETER, Stop

ENGINE, WORKER_0, WORKER_1 = "engine", "worker 0", "worker 1"
GROUP = "the whole group"
EVERYBODY = (FRONT_END, ENGINE, WORKER_0, WORKER_1, GROUP)
NO_WORKERS = (FRONT_END, ENGINE, GROUP)
NO_WORKER_0 = (FRONT_END, ENGINE, WORKER_1, GROUP)
NO_WORKER_1 = (FRONT_END, ENGINE, WORKER_0, GROUP)

SERVING = 14  # calls of a ring's method after which start-up is over for certain

_CHILD = "ringcore.executor.child_process:ChildProcess.start"
_RUN = "ringcore.executor.child_main:run"
_WORKER = "ringcore.executor.worker_proc"
_FAKE = "chaos_worker:ChaosWorker"
_WRITE = "ringcore.executor.ring_buffer:RingWriter.try_write"
_READ = "ringcore.executor.ring_buffer:RingReader.try_read"
_RELEASE = "ringcore.executor.ring_buffer:RingReader.release"
_SEND_LARGE = "ringcore.executor.side_channel:SideSender.try_send"
_RECEIVE_LARGE = "ringcore.executor.side_channel:SideReceiver.receive"
_EXECUTOR = "ringcore.executor.multiproc:MultiprocExecutor"
_GROUP = "ringcore.executor.worker_group:WorkerGroup"
_CORE = "ringcore.engine_core.core:EngineCore"
_ENGINE_CHANNEL = "ringcore.engine_core.transport.channel:EngineChannel"
_CLIENT_CHANNEL = "ringcore.engine_core.transport.channel:ClientChannel"
_CLIENT = "ringcore.front_end.client:EngineCoreClient"


@dataclass(frozen=True)
class Point:
    """One row of the matrix.

    scenario: what the front end does ("serve", "close", or "recover": a worker is killed first and replaced).
    victims: who exists there. options: engine options.
    """

    phase: str
    name: str
    stop: Stop
    victims: tuple[str, ...] = EVERYBODY
    scenario: str = "serve"
    options: dict[str, Any] = field(default_factory=dict)

    def shifted(self, by: int) -> Point:
        """The same point at a later call, where it is one that comes again and again."""
        if self.stop.nth < SERVING:
            return self
        return replace(self, stop=replace(self.stop, nth=self.stop.nth + by))


def _spawn() -> list[Point]:
    def spawn(name: str, role: str, target: str, when: str = "call", nth: int = 1, victims=NO_WORKERS) -> Point:
        return Point("spawn", name, Stop(role, target, when, nth), victims)

    return [
        spawn("before the engine's fork", FRONT_END, _CHILD, victims=(FRONT_END, GROUP)),
        spawn("after the engine's fork", FRONT_END, _CHILD, "return"),
        spawn("engine before its imports", ENGINE, INTERPRETER),
        spawn("engine before it watches its parent", ENGINE, _RUN),
        spawn("engine after its imports", ENGINE, "ringcore.engine_core.process:main"),
        spawn("engine after its hello", ENGINE, f"{_CORE}.__init__"),
        spawn("before the fork of worker 0", ENGINE, _CHILD),
        spawn("after the fork of worker 0", ENGINE, _CHILD, "return"),
        spawn("before the fork of worker 1", ENGINE, _CHILD, nth=2, victims=NO_WORKER_1),
        spawn("worker 0 before its imports", WORKER_0, INTERPRETER, victims=NO_WORKER_1),
        spawn("worker 1 before its imports", WORKER_1, INTERPRETER, victims=EVERYBODY),
        spawn("worker 1 before it watches its parent", WORKER_1, _RUN, victims=EVERYBODY),
        spawn("worker 0 after its imports", WORKER_0, f"{_WORKER}:main", victims=NO_WORKER_1),
        spawn("worker 1 is made", WORKER_1, f"{_FAKE}.__init__", victims=EVERYBODY),
        spawn("hello of worker 1 half-written", WORKER_1, _WRITE, "line 12", victims=EVERYBODY),
    ]


def _start() -> list[Point]:
    def start(name: str, role: str, target: str, when: str = "call", nth: int = 1) -> Point:
        return Point("start", name, Stop(role, target, when, nth))

    return [
        start("init_device begins on worker 0", WORKER_0, f"{_FAKE}.init_device"),
        start("init_device is done on worker 1", WORKER_1, f"{_FAKE}.init_device", "return"),
        start("load_model begins on worker 0", WORKER_0, f"{_FAKE}.load_model"),
        start("load_model is done on worker 1", WORKER_1, f"{_FAKE}.load_model", "return"),
        start("get_kv_cache_spec", WORKER_1, f"{_FAKE}.get_kv_cache_spec"),
        start("profiling of memory", WORKER_0, f"{_FAKE}.determine_available_memory"),
        start("planning of the cache", ENGINE, "ringcore.kv_cache.planner:plan_kv_cache"),
        start("allocation and capture begin on worker 1", WORKER_1, f"{_FAKE}.initialize_from_config"),
        start("allocation and capture are done on worker 0", WORKER_0, f"{_FAKE}.initialize_from_config", "return"),
        start("engine says that it is ready", ENGINE, f"{_ENGINE_CHANNEL}.send"),
    ]


def _serve() -> list[Point]:
    def serve(name: str, role: str, target: str, when: str = "call", nth: int = SERVING) -> Point:
        return Point("serve", name, Stop(role, target, when, nth))

    return [
        Point("idle", "idle", Stop(FRONT_END, "chaos_engine:idle"), scenario="idle"),
        serve("step not yet published", ENGINE, f"{_EXECUTOR}.execute_model"),
        serve("step published, not yet read", ENGINE, f"{_EXECUTOR}.execute_model", "return"),
        serve("record begun", ENGINE, _WRITE, "line 6", nth=40),
        serve("record half-written", ENGINE, _WRITE, "line 16", nth=41),
        serve("record written, not published", ENGINE, _WRITE, "line 21", nth=42),
        serve("record published, readers not woken", ENGINE, _WRITE, "line 26", nth=43),
        serve("record on lease in worker 0", WORKER_0, _READ, "return", nth=90),
        serve("before the ack of worker 1", WORKER_1, _RELEASE, "line 1", nth=30),
        serve("in the ack of worker 0", WORKER_0, _RELEASE, "line 5", nth=31),
        serve("after the ack of worker 1", WORKER_1, _RELEASE, "return", nth=32),
        serve("step begins on worker 0", WORKER_0, f"{_FAKE}.execute_model"),
        serve("step begins on worker 1", WORKER_1, f"{_FAKE}.execute_model"),
        serve("step done on worker 0, no reply yet", WORKER_0, f"{_FAKE}.execute_model", "return"),
        serve("reply half-written", WORKER_0, _WRITE, "line 16", nth=30),
        serve("reply written, not published", WORKER_0, _WRITE, "line 21", nth=31),
        serve("reply published", WORKER_0, _WRITE, "return", nth=32),
        serve("reply on lease in the engine", ENGINE, _READ, "return", nth=120),
        serve("outputs not yet sent", ENGINE, f"{_ENGINE_CHANNEL}.send"),
        serve("outputs sent", ENGINE, f"{_ENGINE_CHANNEL}.send", "return"),
        serve("front end sends", FRONT_END, f"{_CLIENT_CHANNEL}.send", nth=20),
        serve("front end receives", FRONT_END, f"{_CLIENT_CHANNEL}.receive", "return", nth=40),
    ]


def _calls() -> list[Point]:
    def call(name: str, role: str, target: str, when: str = "call", nth: int = 2) -> Point:
        return Point("call", name, Stop(role, target, when, nth))

    return [
        call("call begins on worker 1", WORKER_1, f"{_FAKE}.echo"),
        call("call done on worker 0", WORKER_0, f"{_FAKE}.echo", "return"),
        call("read-only call on worker 1", WORKER_1, f"{_FAKE}.stats"),
        call("large call, before its memory is sent", ENGINE, _SEND_LARGE),
        call("large call, sent to one of two", ENGINE, _SEND_LARGE, "line 14"),
        call("large call, before it is received by worker 1", WORKER_1, _RECEIVE_LARGE),
        call("large reply of worker 0 half-sent", WORKER_0, _SEND_LARGE, "line 10"),
        call("large reply, before the engine receives it", ENGINE, _RECEIVE_LARGE),
    ]


def _recovery() -> list[Point]:
    def recover(name: str, role: str, target: str, when: str = "call", nth: int = 1, generation: int = 1) -> Point:
        stop = Stop(role, target, when, nth, generation)
        return Point("recovery", name, stop, EVERYBODY, "recover", {"max_worker_restarts": 1})

    return [
        replace(
            recover("the engine begins to replace its workers", ENGINE, f"{_EXECUTOR}.restart"), victims=NO_WORKERS
        ),
        replace(recover("new worker 0 before its imports", WORKER_0, INTERPRETER, generation=2), victims=NO_WORKER_1),
        recover("new worker 1 before it watches its parent", WORKER_1, _RUN, generation=2),
        recover("new worker 0 loads", WORKER_0, f"{_FAKE}.load_model", generation=2),
        recover("new worker 1 allocates", WORKER_1, f"{_FAKE}.initialize_from_config", "return", generation=2),
        recover("first recomputed step on new worker 0", WORKER_0, f"{_FAKE}.execute_model", generation=2),
    ]


def _shutdown() -> list[Point]:
    def close(name: str, role: str, target: str, when: str = "call", victims=EVERYBODY) -> Point:
        return Point("shutdown", name, Stop(role, target, when), victims, "close")

    return [
        close("close is called", FRONT_END, f"{_CLIENT}.close"),
        close("the engine begins to shut down", ENGINE, f"{_CORE}.shutdown"),
        close("the workers are about to be told", ENGINE, f"{_GROUP}.close"),
        # The other worker may have ended by then.
        close("worker 0 begins to shut down", WORKER_0, f"{_FAKE}.shutdown", victims=NO_WORKER_1),
        close("worker 1 has shut down", WORKER_1, f"{_FAKE}.shutdown", "return", victims=NO_WORKER_0),
        close("the workers have ended", ENGINE, f"{_GROUP}.close", "return", victims=NO_WORKERS),
    ]


def all_points() -> list[Point]:
    return [*_spawn(), *_start(), *_serve(), *_calls(), *_recovery(), *_shutdown()]
