"""Every message between processes, as typed data. Nothing here knows how it is sent or what acts on it.

    client  ──ClientMessage──▶  engine process  ──SchedulerOutput──▶     every worker
    client  ◀──EngineMessage──  engine process  ◀──ModelRunnerOutput──   the output rank

`requests` is what enters and leaves on both sides of the engine process, `messages` what else clients and engine say,
`steps` what engine and workers say, `methods` what can be called by name, `codec` the bytes. Arrays are one-dimensional
int32 numpy arrays, or float32 where that is said; on the wire they are their raw little-endian bytes. Below is what
callers of the engine meet.
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
