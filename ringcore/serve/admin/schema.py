"""Queries, bodies and answers of admin calls. Unknown fields are refused by their name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictStr
from typing_extensions import TypedDict  # pydantic needs this one, before Python 3.12

from ringcore.protocol.messages import SleepMode
from ringcore.protocol.operations import MemoryTag
from ringcore.tracing import MAX_TRACE_S

__all__ = [
    "AbortAnswer",
    "AbortBody",
    "NoQuery",
    "PauseQuery",
    "ProfileQuery",
    "ReloadBody",
    "ReplicasAnswer",
    "ResetQuery",
    "RpcAnswer",
    "RpcBody",
    "ServerInfo",
    "SleepQuery",
    "SleepingAnswer",
    "StatusAnswer",
    "TimedQuery",
    "UpdateBody",
    "WakeUpQuery",
    "WorldSizeAnswer",
    "WorldSizeQuery",
]

Seconds = Annotated[float, Field(gt=0, le=3600)]
Path = Annotated[StrictStr, Field(min_length=1, max_length=4096, pattern=r"^/[^\x00]*$")]


class NoQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")


class TimedQuery(NoQuery):
    """timeout: seconds until 504. An operation that has begun goes on."""

    timeout: Seconds = 300.0


class SleepQuery(TimedQuery):
    level: Annotated[int, Field(ge=0, le=2)] = 1
    mode: SleepMode = "abort"


class WakeUpQuery(TimedQuery):
    tags: list[MemoryTag] = []  # none: all


class PauseQuery(TimedQuery):
    """mode: of requests that run: "abort" ends all requests, "wait" lets the running ones end while others stay in the
    queue, "keep" computes the rest after /resume. clear_cache: empties the prefix cache, unless they are kept."""

    mode: SleepMode = "abort"
    clear_cache: bool = True


class ResetQuery(TimedQuery):
    """reset_running_requests: preempts them, to be recomputed; else nothing changes while some run."""

    reset_running_requests: bool = False


class ProfileQuery(NoQuery):
    """seconds: until it ends by itself. operators: torch's too, which slows the workers."""

    seconds: Annotated[float, Field(gt=0, le=MAX_TRACE_S)] = 60.0
    operators: bool = False


class WorldSizeQuery(NoQuery):
    include_dp: bool = True  # the ranks of all replicas


class TimedBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    timeout: Seconds = 300.0


class ReloadBody(TimedBody):
    """path: a safetensors folder or file on the server's disk."""

    path: Path
    mode: SleepMode = "keep"


class UpdateBody(TimedBody):
    path: Path


class AbortBody(BaseModel):
    """request_ids: the `id` of answers ("chatcmpl-..."), or of one prompt of several ("cmpl-...-0"). None: all."""

    model_config = ConfigDict(extra="forbid")

    request_ids: Annotated[list[StrictStr], Field(max_length=10_000)] | None = None


class RpcBody(TimedBody):
    """unique_reply_rank: the only rank of each replica that replies."""

    method: Annotated[StrictStr, Field(min_length=1)]
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    timeout: Seconds = 60.0
    unique_reply_rank: int | None = None


class ReplicasAnswer(TypedDict):
    """replicas: for each engine its number under "replica", and what it answered."""

    replicas: list[dict[str, Any]]


class StatusAnswer(ReplicasAnswer):
    status: Literal["paused", "resumed"]


class SleepingAnswer(TypedDict, total=False):
    is_sleeping: bool  # of all
    is_paused: bool
    replicas: list[dict[str, Any]]


class AbortAnswer(TypedDict):
    status: Literal["aborted"]
    aborted: int
    request_ids: list[str]


class RpcAnswer(ReplicasAnswer):
    results: list[Any]  # of each rank, those of replica 0 first


class WorldSizeAnswer(TypedDict):
    world_size: int


class ServerInfo(ReplicasAnswer):
    version: str
    served_model_names: list[str]
    config: dict[str, Any]  # every engine option of replica 0, resolved
    service: dict[str, Any]  # every bound of the service
