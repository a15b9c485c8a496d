"""Every message between processes, as typed data, independent of the transport and of the components that act on it.

    client  ──ClientMessage──▶  engine process  ──SchedulerOutput──▶     every worker
    client  ◀──EngineMessage──  engine process  ◀──ModelRunnerOutput──   the output rank

`requests` has the requests and outputs, `messages` the other messages between clients and engine, `steps` those between
engine and workers, `methods` the methods that can be called by name, `codec` the encoding. Arrays are one-dimensional
int32 numpy arrays, or float32 where noted; on the wire they are their raw little-endian bytes. This module exports the
types that callers of the engine see.
"""

from ringcore.protocol.messages import EngineHealth, EngineReady, MemoryReport, RankHealth
from ringcore.protocol.requests import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineStats,
    PromptLogprobs,
    TokenLogprobs,
)

__all__ = [
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "EngineCoreRequest",
    "EngineHealth",
    "EngineReady",
    "EngineStats",
    "MemoryReport",
    "PromptLogprobs",
    "RankHealth",
    "TokenLogprobs",
]
