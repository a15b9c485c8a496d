"""Every message between processes, as typed data. Nothing here knows how it is sent or what acts on it.

    client  ──ClientMessage──▶  engine process  ──SchedulerOutput──▶     every worker
    client  ◀──EngineMessage──  engine process  ◀──ModelRunnerOutput──   the output rank

Arrays are one-dimensional int32 numpy arrays; on the wire they are their raw little-endian bytes.
"""

from __future__ import annotations

from typing import Any, Literal

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
    "HealthState",
    "IntArray",
    "ModelRunnerOutput",
    "NewRequest",
    "RankHealth",
    "RowError",
    "RpcCall",
    "RpcResult",
    "SchedulerOutput",
    "Shutdown",
    "TokenLogprobs",
    "WireError",
    "decoder",
    "encoder",
    "int_array",
]

IntArray = np.ndarray  # [n] int32


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


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one generated position: the sampled token first, then the most likely, best first."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


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


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """The engine's state after a step."""

    step: int
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_preemptions: int  # since start
    num_prefix_hit_tokens: int  # since start
    num_prefix_query_tokens: int  # since start


class EngineCoreOutputs(msgspec.Struct, frozen=True, tag="outputs"):
    outputs: list[EngineCoreOutput]
    stats: EngineStats


# ---------------------------------------------------------------------------------------------------------------
# A step: one value down, one value back.


class NewRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request that gets a row: new, or resumed after a preemption (then its generated tokens are in `token_ids`)."""

    row: int
    token_ids: np.ndarray  # [num_tokens] int32: the prompt, then tokens generated before a preemption
    num_prompt_tokens: int
    num_computed_tokens: int  # found in the prefix cache
    block_ids: np.ndarray  # [num_blocks] int32
    sampling_params: SamplingParams
    seed: int  # the request's own, or one that the engine drew
    stop_token_ids: list[int]  # barred until min_tokens; the model's end of text among them unless ignored


class SchedulerOutput(msgspec.Struct, frozen=True, array_like=True):
    """One step for every rank. Applied in the order of the fields.

    A row samples a token in this step exactly if all its known tokens are computed after it: the worker sees
    that from its own rows, as the scheduler does from its own.
    """

    step: int
    finished_rows: np.ndarray  # [n] int32: rows given back since the last step (finished, aborted, preempted)
    new_requests: list[NewRequest]
    new_block_rows: np.ndarray  # [n] int32: new_block_ids[i] is appended to the block table of this row
    new_block_ids: np.ndarray  # [n] int32
    rows: np.ndarray  # [num_scheduled] int32
    num_scheduled_tokens: np.ndarray  # [num_scheduled] int32, each at least 1

    @property
    def num_tokens(self) -> int:
        return int(self.num_scheduled_tokens.sum())


class RowError(msgspec.Struct, frozen=True, array_like=True):
    """This row's request cannot go on (its logits are not finite, say); the others are unharmed."""

    row: int
    message: str


class ModelRunnerOutput(msgspec.Struct, frozen=True, array_like=True):
    """What a step sampled, in the order of `SchedulerOutput.rows`, rows that sampled nothing left out."""

    step: int
    rows: np.ndarray  # [num_sampled] int32
    token_ids: np.ndarray  # [num_sampled] int32
    logprobs: list[TokenLogprobs | None] | None = None  # [num_sampled], where any row asked
    row_errors: list[RowError] = []


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
    """What the engine learned at start."""

    num_blocks: int  # usable: the null block is not counted
    block_size: int
    token_capacity: int  # num_blocks * block_size
    max_model_len: int
    max_concurrency: float  # requests of max_model_len that the cache holds at once
    phase_seconds: dict[str, float]  # seconds of each phase of start-up, in order
    memory_bytes: list[dict[str, int]]  # one table a rank: total, weights, activations, kv_cache, ...
    pids: dict[str, int]  # "engine", "worker 0", ...
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
    """How the engine does. "starting" also while it replaces workers that died."""

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


class EngineRecovering(msgspec.Struct, frozen=True, tag="recovering"):
    """The workers died of `cause`, and new ones are being started; an `EngineReady` or `EngineDead` follows."""

    cause: WireError
    num_restarts: int


class EngineDead(msgspec.Struct, frozen=True, tag="dead"):
    """The last message of an engine process that cannot go on, before or after it was ready."""

    error: WireError


EngineMessage = EngineReady | EngineCoreOutputs | RpcResult | EngineRecovering | EngineDead


# ---------------------------------------------------------------------------------------------------------------
# Encoding.


def _encode_extra(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype == np.int32 and value.ndim == 1:
        return value.tobytes()
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"cannot encode {type(value).__name__}")


def _decode_extra(kind: type, value: Any) -> Any:
    if kind is np.ndarray and isinstance(value, bytes):
        return np.frombuffer(value, dtype=np.int32)
    raise TypeError(f"cannot decode {kind!r} from {type(value).__name__}")


def encoder() -> msgspec.msgpack.Encoder:
    return msgspec.msgpack.Encoder(enc_hook=_encode_extra)


def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """A decoder for exactly one type or union of this file."""
    return msgspec.msgpack.Decoder(kind, dec_hook=_decode_extra)
