"""What an engine tells about itself: every value here is bounded, however many requests and blocks there are."""

from __future__ import annotations

from typing import Literal

import msgspec

from ringcore.protocol.messages import EngineHealth

__all__ = [
    "MAX_CELLS",
    "MAX_ID_CHARS",
    "MAX_REQUESTS",
    "MAX_STEPS",
    "BlockMap",
    "EngineAbout",
    "EngineSnapshot",
    "RequestList",
    "RequestReport",
    "RequestState",
    "Spread",
    "StepReport",
]

MAX_REQUESTS = 1000  # of one answer
MAX_ID_CHARS = 1024  # of a request id in it: a longer one is cut
MAX_CELLS = 4096
MAX_STEPS = 1024  # that an engine remembers

# "compiling": its grammar is. "held": by the quarantine, while suspects of the workers' death are tried one by one.
# "loading": the beginning of its prompt is, from a store beyond the device.
RequestState = Literal["running", "waiting", "preempted", "held", "compiling", "loading"]


class RequestReport(msgspec.Struct, frozen=True):
    """One unfinished request. Seconds are ages at the time of the answer."""

    request_id: str
    state: RequestState
    age_s: float  # since it arrived
    waiting_s: float | None  # without a row since it arrived or was preempted; None of a running one
    first_scheduled_s: float | None  # from its arrival to its first step
    num_prompt_tokens: int
    num_generated_tokens: int
    max_generated_tokens: int  # at which it ends at the latest
    num_computed_tokens: int  # in the KV cache, or in a step in flight
    num_cached_tokens: int  # prefix cache hit at its first start
    num_blocks: int
    priority: int
    num_preemptions: int


class RequestList(msgspec.Struct, frozen=True):
    """num_by_state: of all unfinished requests, every state. oldest: the first to arrive, as many as were asked for."""

    num_by_state: dict[RequestState, int]
    oldest: list[RequestReport]


class BlockMap(msgspec.Struct, frozen=True):
    """The KV cache's blocks in the order of their ids; a cell is `blocks_per_cell` of them, the last one may be fewer.

    cells: of each its free blocks, which hold nothing; the cached ones that no request uses; those in use by one
    request; those shared by several. num_blocks: the sum of these four over all cells; the null block is not counted.
    """

    num_blocks: int
    num_free: int
    num_cached: int
    num_used: int
    num_shared: int
    blocks_per_cell: int
    cells: list[tuple[int, int, int, int]]


class Spread(msgspec.Struct, frozen=True):
    """Seconds: percentiles and the maximum."""

    p50_s: float
    p90_s: float
    p99_s: float
    max_s: float


class StepReport(msgspec.Struct, frozen=True):
    """The last steps, `num_steps` of them. The rates are of the last `window_s` seconds: 10, or those of the remembered
    steps if they took less.

    parts: of those that have happened, by name:

        step       since the step before completed or, if that is later, since its scheduling began
        schedule   deciding what the step computes
        launch     handing it to the workers
        wait       until the engine takes their output; includes the step before, if that was in flight
        update     applying the output
        send       handing the outputs of a step to the client

    last: the newest steps, as many as were asked for, the newest last, as columns: `age_s`, the parts as `step_s` and
    so on without `send`, `num_scheduled_tokens`, `num_sampled_tokens`.
    """

    num_steps: int
    window_s: float
    scheduled_tokens_per_s: float  # tokens computed: of prompts, and generated ones
    generated_tokens_per_s: float
    steps_per_s: float
    parts: dict[str, Spread] = {}
    last: dict[str, list[float]] = {}


class EngineAbout(msgspec.Struct, frozen=True):
    """What does not change while the engine's workers live."""

    model: str
    device: str  # the option; workers tell what "auto" became
    age_s: float
    pids: dict[str, int]  # "engine", "worker 0", ...
    world_size: int
    num_blocks: int  # usable
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    steps_in_flight: int
    scheduling_policy: str


class EngineSnapshot(msgspec.Struct, frozen=True):
    """All of it at one moment, between two steps. Counts are since the engine's start."""

    about: EngineAbout
    health: EngineHealth
    requests: RequestList
    blocks: BlockMap
    steps: StepReport
    taken_s: float  # the engine's monotonic clock
    cpu_s: float  # CPU seconds of the engine process
    resident_bytes: int  # of the engine process
    num_steps: int
    num_scheduled_tokens: int
    num_generated_tokens: int
    num_preemptions: int
    num_prefix_hit_tokens: int
    num_prefix_query_tokens: int
    num_draft_tokens: int | None = None  # that the model verified; None: without speculative decoding
    num_accepted_tokens: int | None = None  # of these, the accepted ones
