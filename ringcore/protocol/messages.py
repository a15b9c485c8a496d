"""What client and engine process say to each other."""

from __future__ import annotations

from typing import Literal

import msgspec

from ringcore.protocol.requests import EngineCoreRequest, OutputColumns, WireError

__all__ = [
    "AbortRequests",
    "AddRequests",
    "ClientMessage",
    "EngineDead",
    "EngineHealth",
    "EngineMessage",
    "EngineReady",
    "EngineRecovering",
    "HealthState",
    "MemoryReport",
    "MemoryState",
    "PauseMode",
    "RankHealth",
    "RpcCall",
    "RpcResult",
    "Shutdown",
    "SleepMode",
]

PauseMode = Literal["new", "all"]
# Of weights or KV cache: in the device's memory; on the host; nowhere; in the device's memory, and not what they were.
MemoryState = Literal["resident", "offloaded", "discarded", "stale"]
SleepMode = Literal["abort", "wait", "keep"]  # requests are ended, finished first, or computed again later


class AddRequests(msgspec.Struct, frozen=True, tag="add", forbid_unknown_fields=True):
    requests: list[EngineCoreRequest]


class AbortRequests(msgspec.Struct, frozen=True, tag="abort", forbid_unknown_fields=True):
    request_ids: list[str]


class RpcCall(msgspec.Struct, frozen=True, tag="rpc", forbid_unknown_fields=True):
    """A call to the engine itself (`target="engine"`) or to every worker (`target="workers"`).

    The arguments travel as the buffers beside this message (`executor.value_codec`); those for workers the engine
    passes on unread. A call of the engine without buffers has none. `method` is the name, also that of a callable.
    """

    call_id: int
    target: str
    method: str
    is_callable: bool = False
    timeout_s: float | None = None
    unique_reply_rank: int | None = None


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown", forbid_unknown_fields=True):
    pass


ClientMessage = AddRequests | AbortRequests | RpcCall | Shutdown


class EngineReady(msgspec.Struct, frozen=True, tag="ready"):
    """What the engine learned at start.

    `phase_seconds` has the phases, one after the other: start_workers (until every process has its worker), init_device
    (the device and the other ranks), load_model, get_kv_cache_spec, determine_available_memory (on a GPU the largest
    steps are run), plan_kv_cache, initialize_from_config (pages, warm-up, CUDA graphs). A name with a dot is a part of
    a phase, of the rank that took longest for it; parts may overlap:

        start_workers.boot, .create                the interpreter's start; imports, torch above all
        init_device.device, .connect               the GPU's context; meeting the other ranks
        load_model.weights, .kernels               reading; compiling meanwhile
        initialize_from_config.pages, .warm_up     memory for the KV cache; a first step and the graphs
    """

    num_blocks: int  # usable: the null block is not counted
    block_size: int
    token_capacity: int  # tokens of requests of max_model_len that the cache holds at once
    max_model_len: int  # as it was fitted, where it was "auto"
    max_concurrency: float  # requests of max_model_len that the cache holds at once
    phase_seconds: dict[str, float]  # in order
    memory_bytes: list[dict[str, int]]  # one table a rank: total, weights, activations, kv_cache, ...
    pids: dict[str, int]  # "engine", "worker 0", ...
    max_num_batched_tokens: int  # as the device has it, where the user did not say
    num_graphs_left: int = 0  # CUDA graphs of each rank that are captured while the engine has nothing else to do
    admin_endpoint: str | None = None  # where AdminClients connect, its port as it was picked


class RpcResult(msgspec.Struct, frozen=True, tag="rpc_result"):
    """What a call came to. The values are in the buffers beside this message: `num_parts[i]` of them make value i."""

    call_id: int
    num_parts: list[int] = []
    error: WireError | None = None


class RankHealth(msgspec.Struct, frozen=True):
    """One worker as its parent sees it, without asking it anything."""

    rank: int
    pid: int
    process_state: str  # "running", "sleeping", "disk sleep", "stopped", "zombie", "gone": what the kernel says
    heartbeat_age_s: float  # since a thread of it last ran: seconds, where native code holds the interpreter
    method: str | None  # what it executes
    busy_s: float  # for how long
    num_calls: int  # executed since its start, steps among them


HealthState = Literal["starting", "ready", "sleeping", "stalled", "dead"]


class EngineHealth(msgspec.Struct, frozen=True):
    """How the engine does. "starting" also while it replaces workers that died, "sleeping" also while its weights are
    stale."""

    state: HealthState
    step: int = 0
    last_step_age_s: float | None = None  # since the last step that came back
    oldest_step_s: float | None = None  # how long the oldest step in flight has taken so far
    oldest_waiting_s: float | None = None  # how long the request that waits longest has waited for a row
    num_running: int = 0
    num_waiting: int = 0
    num_restarts: int = 0
    restart_cause: str | None = None  # of the last restart
    ranks: list[RankHealth] = []
    error: str | None = None  # what the engine died of
    memory: dict[str, MemoryState] = {}  # by tag: "weights", "kv_cache"


class MemoryReport(msgspec.Struct, frozen=True):
    """What a sleep, a wake-up or an update of weights came to.

    ranks: what each rank tells of it, bytes and seconds by name: `weights_freed_bytes`, `kv_cache_freed_bytes`,
    `cached_freed_bytes` (what torch's allocator held and did not use), `residue_bytes` (what the process has of the
    device afterwards), `copied_bytes`, `copy_s`, `mapped_bytes`, `map_s`, `host_store_s` (waited for memory of the
    host), and the seconds of the other parts; of an update `num_tensors`, `num_bytes`, `seconds`. A name is left out
    where it does not apply. In a wake-up copies go on while memory is mapped: `copy_s`, from the first one's begin to
    the last one's end, and `map_s` overlap.
    """

    states: dict[str, MemoryState]  # by tag, from now on
    seconds: float  # from the asking, requests that were waited for included
    ranks: list[dict[str, float]] = []


class EngineRecovering(msgspec.Struct, frozen=True, tag="recovering"):
    """The workers died of `cause`, and new ones are being started; an `EngineReady` or `EngineDead` follows."""

    cause: WireError
    num_restarts: int


class EngineDead(msgspec.Struct, frozen=True, tag="dead"):
    """The last message of an engine process that cannot go on, before or after it was ready."""

    error: WireError


EngineMessage = EngineReady | OutputColumns | RpcResult | EngineRecovering | EngineDead
