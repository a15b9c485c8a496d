"""Every message between processes, as typed data. Nothing here knows how it is sent or what acts on it.

    client  ──ClientMessage──▶  engine process  ──SchedulerOutput──▶     every worker
    client  ◀──EngineMessage──  engine process  ◀──ModelRunnerOutput──   the output rank

Arrays are one-dimensional int32 numpy arrays, or float32 where that is said; on the wire they are their raw
little-endian bytes.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import msgspec
import numpy as np

from ringcore.outputs import FinishReason
from ringcore.sampling_params import SamplingParams

__all__ = [
    "AbortRequests",
    "AddRequests",
    "ClientMessage",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "EngineCoreRequest",
    "EngineDead",
    "EngineHealth",
    "EngineMessage",
    "EngineReady",
    "EngineRecovering",
    "EngineStats",
    "FloatArray",
    "HealthState",
    "IntArray",
    "MemoryReport",
    "MemoryState",
    "ModelRunnerOutput",
    "NewBlocks",
    "NewRequest",
    "OutputColumns",
    "PauseMode",
    "PendingOutput",
    "PromptLogprobs",
    "RankHealth",
    "RowError",
    "RpcCall",
    "RpcResult",
    "SchedulerOutput",
    "Shutdown",
    "SleepMode",
    "StartedRequest",
    "TokenLogprobs",
    "WireError",
    "decoder",
    "encoder",
    "int_array",
]

IntArray = np.ndarray  # [n] int32
FloatArray = np.ndarray[tuple[int], np.dtype[np.float32]]  # [n] float32
PauseMode = Literal["new", "all"]
# Of weights or KV cache: in the device's memory; on the host; nowhere; in the device's memory, and not what they were.
MemoryState = Literal["resident", "offloaded", "discarded", "stale"]
SleepMode = Literal["abort", "wait", "keep"]  # requests are ended, finished first, or computed again later


def int_array(values: Any = ()) -> np.ndarray:
    return np.asarray(values, dtype=np.int32).reshape(-1)


class WireError(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`errors.error_to_wire` as a type: what `errors.error_from_wire` raises again."""

    type: str
    message: str
    details: dict[str, Any] = {}


# ---------------------------------------------------------------------------------------------------------------
# A request enters, tokens leave.


class EngineCoreRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request as EngineCore takes it: token ids only. `arrival_s` is on the host's monotonic clock."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    arrival_s: float
    priority: int = 0
    cache_salt: str | None = None
    bad_words_token_ids: list[list[int]] = []  # the words of `sampling_params.bad_words`, by the model's tokenizer


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one generated position: the sampled token first, then the most likely, best first."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at positions 1 to n - 1 of a prompt of n tokens, each under the tokens before it; all of them,
    in the step that computes the prompt's last token.

    The columns have `1 + count` entries a position: the prompt's own token first, then the `count` most likely, best
    first.
    """

    row: int
    count: int
    token_ids: np.ndarray  # [(n - 1) * (1 + count)] int32
    logprobs: FloatArray  # likewise
    ranks: np.ndarray  # likewise, int32; 1 is the most likely


class EngineCoreOutput(msgspec.Struct, frozen=True, array_like=True):
    """What one request gained in one step. The last one of a request has a finish reason (or an error)."""

    request_id: str
    new_token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None  # one a new token
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None  # the stop token id, None for the model's own end of text
    num_cached_tokens: int = 0
    first_scheduled_s: float | None = None
    num_preemptions: int = 0
    error: WireError | None = None
    prompt_logprobs: PromptLogprobs | None = None  # once, with the first new token


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """The engine's state after a step."""

    step: int
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_preemptions: int  # since start
    num_prefix_hit_tokens: int  # since start
    num_prefix_query_tokens: int  # since start
    is_sleeping: bool = False  # no step is begun before a wake-up, or before the end of an update of weights


class EngineCoreOutputs(msgspec.Struct, frozen=True):
    """What a step gave, request by request."""

    outputs: list[EngineCoreOutput]
    stats: EngineStats


class StartedRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request was given a row; from here on the row stands for it, until another one is given the row."""

    row: int
    request_id: str
    num_cached_tokens: int
    first_scheduled_s: float
    num_preemptions: int


class OutputColumns(msgspec.Struct, frozen=True, tag="outputs"):
    """`EngineCoreOutputs` as columns: nothing in it is made for each request and step. Read in the order of the fields
    (`engine_core.output_reader`).
    """

    started: list[StartedRequest]
    rows: np.ndarray  # [num_rows] int32: those that gained tokens and go on
    token_ids: np.ndarray  # [num_rows * num_steps] int32: row after row, the same number each
    logprobs: list[TokenLogprobs | None] | None  # as `token_ids`, where any row asked
    others: list[EngineCoreOutput]  # the last output of requests that ended, tokens of this step among them
    stats: EngineStats
    prompt_logprobs: list[PromptLogprobs] = []  # of rows in `rows`; of those that ended it is in `others`

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to read in it but the stats."""
        return not (self.started or len(self.rows) or self.others)


# ---------------------------------------------------------------------------------------------------------------
# A step: one value down, one value back.


class NewRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request that gets a row: new, or resumed after a preemption (then its generated tokens are in `token_ids`).

    num_computed_tokens <= num_cached_tokens: the slots of the first num_cached_tokens tokens hold their keys and
    values, and may be shared. Of a prompt that is wholly cached the last token is computed again, for its logits; its
    slot is read and not written.

    The request's `prompt_logprobs` are wanted exactly if it comes with its prompt alone; then nothing is cached.
    """

    row: int
    token_ids: np.ndarray  # [num_tokens] int32: the prompt, then tokens generated before a preemption
    num_prompt_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    block_ids: list[np.ndarray]  # by KV cache group: [num_blocks] int32; 0 where the window has left the block behind
    sampling_params: SamplingParams
    seed: int  # the request's own, or one that the engine drew
    stop_token_ids: list[int]  # barred until min_tokens; the model's end of text among them unless ignored
    bad_words_token_ids: list[list[int]] = []  # none of these sequences is completed


class NewBlocks(msgspec.Struct, frozen=True, array_like=True):
    """block_ids[i] is appended to the block table of rows[i] in one KV cache group. A row may come several times."""

    rows: np.ndarray  # [n] int32
    block_ids: np.ndarray  # [n] int32


class SchedulerOutput(msgspec.Struct, frozen=True, array_like=True):
    """One step for every rank, or `num_steps` of them. Applied in the order of the fields.

    A row samples a token in this step exactly if all its known tokens are computed after it: the worker sees
    that from its own rows, as the scheduler does from its own.

    With num_steps > 1 every row computes its one token that is left, samples, and does so again with the token that it
    sampled, num_steps times in all; the blocks for that are there.
    """

    step: int  # of the first, where there are several
    num_steps: int
    finished_rows: np.ndarray  # [n] int32: rows given back since the last step (finished, aborted, preempted)
    new_requests: list[NewRequest]
    new_blocks: list[NewBlocks]  # by KV cache group; empty where no group has any
    rows: np.ndarray | None  # [num_scheduled] int32; None: those of the step before, in its order
    num_scheduled_tokens: np.ndarray | None  # [num_scheduled] int32, each at least 1; None: one token each
    num_tokens: int  # that are computed, over all rows and steps


class RowError(msgspec.Struct, frozen=True, array_like=True):
    """This row's request cannot go on (its logits are not finite, say); the others are unharmed."""

    row: int
    message: str


class ModelRunnerOutput(msgspec.Struct, frozen=True, array_like=True):
    """What a step sampled, in the order of `SchedulerOutput.rows`; rows that sampled nothing, or that have an error,
    are left out.
    """

    step: int
    rows: np.ndarray | None  # [num_sampled] int32; None: all of the step's rows
    token_ids: np.ndarray  # [num_sampled * num_steps] int32: row after row, num_steps each
    logprobs: list[TokenLogprobs | None] | None = None  # as `token_ids`, where any row asked
    row_errors: list[RowError] = []
    prompt_logprobs: list[PromptLogprobs] = []  # of rows that asked, where this step computed their prompt's last token


class PendingOutput(Protocol):
    """What a worker may return of a step in place of its output: the step is launched on the device, and the next one
    may be launched before the output of this one is taken. It is sent nowhere.

    Whoever holds several of one worker takes their results in the order of the steps, on the worker's own thread.
    """

    def done(self) -> bool:
        """Whether `result` would return, or raise, at once. It is asked often, and must be cheap: a microsecond."""
        ...

    def result(self) -> ModelRunnerOutput | None:
        """What `execute_model` would have returned, or raised. Waits; called once, and always, also on ranks that owe
        no output."""
        ...


# ---------------------------------------------------------------------------------------------------------------
# Client and engine process.


class AddRequests(msgspec.Struct, frozen=True, tag="add", forbid_unknown_fields=True):
    requests: list[EngineCoreRequest]


class AbortRequests(msgspec.Struct, frozen=True, tag="abort", forbid_unknown_fields=True):
    request_ids: list[str]


class RpcCall(msgspec.Struct, frozen=True, tag="rpc", forbid_unknown_fields=True):
    """A call to the engine itself (`target="engine"`) or to every worker (`target="workers"`).

    A worker's arguments travel as the buffers beside this message (`executor.value_codec`), which the engine passes on
    unread; the engine's own methods take none. `method` is the name, also that of a callable.
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


# ---------------------------------------------------------------------------------------------------------------
# Encoding.


_ARRAY_DTYPES = (np.int32, np.float32)


def _encode_extra(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype in _ARRAY_DTYPES and value.ndim == 1:
        return value.tobytes()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"cannot encode {type(value).__name__}")


def _decode_extra(kind: type, value: Any) -> Any:
    if isinstance(value, bytes) and (kind is np.ndarray or kind == FloatArray):
        return np.frombuffer(value, dtype=np.int32 if kind is np.ndarray else np.float32)
    raise TypeError(f"cannot decode {kind!r} from {type(value).__name__}")


def encoder() -> msgspec.msgpack.Encoder:
    return msgspec.msgpack.Encoder(enc_hook=_encode_extra)


def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """A decoder for exactly one type or union of this file."""
    return msgspec.msgpack.Decoder(kind, dec_hook=_decode_extra)
