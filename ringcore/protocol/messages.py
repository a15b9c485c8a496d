"""The messages between a client and its engine process."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ringcore.protocol.kernel_tuning import KernelTuning
from ringcore.protocol.model_report import ModelReport
from ringcore.protocol.operations import MemoryOperation, SleepMode
from ringcore.protocol.requests import EngineCoreRequest, OutputColumns, WireError

__all__ = [
    "AbortRequests",
    "AddRequests",
    "CallOptions",
    "ClientMessage",
    "EngineDead",
    "EngineHealth",
    "EngineMessage",
    "EngineReady",
    "EngineRecovering",
    "FrontEndTrace",
    "HealthState",
    "MemoryReport",
    "MemoryState",
    "Operate",
    "PauseMode",
    "RankHealth",
    "RpcCall",
    "RpcResult",
    "Shutdown",
    "SleepMode",
    "StartTrace",
    "TakeTrace",
]

PauseMode = Literal["new", "all"]
# Of weights or KV cache: in device memory; in host memory; freed; in device memory with outdated or undefined contents.
MemoryState = Literal["resident", "offloaded", "discarded", "stale"]


class AddRequests(msgspec.Struct, frozen=True, tag="add", forbid_unknown_fields=True):
    requests: list[EngineCoreRequest]


class AbortRequests(msgspec.Struct, frozen=True, tag="abort", forbid_unknown_fields=True):
    request_ids: list[str]


class CallOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a call is executed.

    timeout_s: from the submission; None waits for result or death. unique_reply_rank: every rank executes the call,
    only this one replies; None: all reply.
    """

    timeout_s: float | None = None
    unique_reply_rank: int | None = None

    def options(self) -> dict[str, Any]:
        """The options alone, for another record of the same call."""
        return {name: getattr(self, name) for name in CallOptions.__struct_fields__}


class RpcCall(CallOptions, frozen=True, tag="rpc", forbid_unknown_fields=True):
    """A call to the engine itself (`target="engine"`) or to every worker (`target="workers"`).

    The arguments are the buffers after this message (`executor.value_codec`); the engine forwards those for workers
    without decoding them. A call to the engine without buffers has no arguments. `method` is the name, also of a
    callable.
    """

    call_id: int
    target: str
    method: str
    is_callable: bool = False


class Operate(msgspec.Struct, frozen=True, tag="operate", forbid_unknown_fields=True):
    """A sleep, wake-up or weight update. Its `RpcResult` has one value, a `MemoryReport`."""

    call_id: int
    operation: MemoryOperation
    timeout_s: float | None = None


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown", forbid_unknown_fields=True):
    pass


class FrontEndTrace(msgspec.Struct, frozen=True, tag="front_end_trace", forbid_unknown_fields=True):
    """The client's part of a trace, in answer to `TakeTrace`. trace: an encoded `tracing.ProcessTrace`."""

    number: int
    trace: bytes


ClientMessage = AddRequests | AbortRequests | RpcCall | Operate | FrontEndTrace | Shutdown


class EngineReady(msgspec.Struct, frozen=True, tag="ready"):
    """The engine's report of its start.

    `phase_seconds` has the phases in order: start_workers (until every process has created its worker), init_device
    (the device and the process group), load_model, get_kv_cache_spec, tune_kernels (where `kernel_autotune` is given),
    determine_available_memory (on a GPU a profile run of the largest steps), plan_kv_cache, initialize_from_config (KV
    cache pages, warm-up, CUDA graphs). A name with a dot is a part of a phase, of the rank that took longest for it;
    parts may overlap:

        start_workers.boot, .create                start of the interpreter; imports, mainly torch
        init_device.device, .connect               the GPU's context; the process group
        load_model.build, .weights, .kernels       the model without weights; reading these; compiling kernels meanwhile
        initialize_from_config.pages, .warm_up     memory for the KV cache; a first step and graph capture

    Of a parked engine that was adopted it has one phase: adopt_parked, until it was awake.
    """

    num_blocks: int  # usable: the null block is not counted
    block_size: int
    token_capacity: int  # tokens of requests of max_model_len that the cache holds at once
    max_model_len: int  # the fitted one, for "auto"
    max_concurrency: float  # requests of max_model_len that the cache holds at once
    phase_seconds: dict[str, float]  # in order
    memory_bytes: list[dict[str, int]]  # one table per rank: total, weights, activations, kv_cache, ...
    pids: dict[str, int]  # "engine", "worker 0", ...
    max_num_batched_tokens: int  # the device's default, unless the user set it
    num_graphs_left: int = 0  # CUDA graphs of each rank that are captured while the engine is idle
    model: ModelReport | None = None  # on rank 0
    kv_cache_token_bytes: int = 0  # of a token in the caches of all layers, on one rank of each stage
    admin_endpoint: str | None = None  # the address for AdminClients, with the port that was picked
    kernel_tuning: KernelTuning | None = None  # of `kernel_autotune`, on rank 0


class RpcResult(msgspec.Struct, frozen=True, tag="rpc_result"):
    """The result of a call. The values are in the buffers after this message: `num_parts[i]` of them make value i."""

    call_id: int
    num_parts: list[int] = []
    error: WireError | None = None


class RankHealth(msgspec.Struct, frozen=True):
    """The state of one worker, read by its parent without a call to it."""

    rank: int
    pid: int
    process_state: str  # "running", "sleeping", "disk sleep", "stopped", "zombie", "gone": the kernel's view
    heartbeat_age_s: float  # since its heartbeat thread last ran: seconds, if native code holds the GIL
    method: str | None  # the method that it executes
    busy_s: float  # for how long
    num_calls: int  # executed since its start, including steps


HealthState = Literal["starting", "ready", "sleeping", "stalled", "dead"]


class EngineHealth(msgspec.Struct, frozen=True):
    """The engine's health. "starting" also while it replaces dead workers, "sleeping" also while its weights are
    stale."""

    state: HealthState
    step: int = 0
    last_step_age_s: float | None = None  # since the last step completed
    oldest_step_s: float | None = None  # age of the oldest step in flight
    oldest_waiting_s: float | None = None  # longest time that a request in the waiting queue has waited
    num_running: int = 0
    num_waiting: int = 0
    num_restarts: int = 0
    restart_cause: str | None = None  # of the last restart
    ranks: list[RankHealth] = []
    error: str | None = None  # the cause of the engine's death
    memory: dict[str, MemoryState] = {}  # by tag: "weights", "kv_cache"
    paused: PauseMode | None = None
    kv_cache_use: float | None = None  # the share of its blocks that requests hold, from 0 to 1


class MemoryReport(msgspec.Struct, frozen=True):
    """The result of a sleep, a wake-up or a weight update.

    ranks: each rank's report, bytes and seconds by name: `weights_freed_bytes`, `kv_cache_freed_bytes`,
    `cached_freed_bytes` (unused memory in torch's caching allocator), `residue_bytes` (device memory that the process
    still holds), `copied_bytes`, `copy_s`, `mapped_bytes`, `map_s`, `host_store_s` (waiting for host memory), and the
    seconds of the other parts; of an update `num_tensors`, `num_bytes`, `seconds`. Names that do not apply are left
    out. In a wake-up copies overlap with mapping: `copy_s`, from the start of the first copy to the end of the last,
    and `map_s` overlap.
    """

    states: dict[str, MemoryState]  # by tag, afterwards
    seconds: float  # since the call, including the wait for requests
    ranks: list[dict[str, float]] = []


class EngineRecovering(msgspec.Struct, frozen=True, tag="recovering"):
    """The workers are lost because of `cause`, and new ones start; an `EngineReady` or `EngineDead` follows."""

    cause: WireError
    num_restarts: int


class EngineDead(msgspec.Struct, frozen=True, tag="dead"):
    """The last message of an engine process that died, before or after it was ready."""

    error: WireError


class StartTrace(msgspec.Struct, frozen=True, tag="start_trace"):
    """The client records its part of a trace until `deadline_ns`, on the host's monotonic clock."""

    deadline_ns: int


class TakeTrace(msgspec.Struct, frozen=True, tag="take_trace"):
    """The client ends the trace and answers with `FrontEndTrace`, unless it reads this too late. number: of the
    answer."""

    number: int
    deadline_ns: int  # the engine waits for the answer until then


EngineMessage = EngineReady | OutputColumns | RpcResult | EngineRecovering | EngineDead | StartTrace | TakeTrace
