"""ringcore: an engine that runs large language models.

Importing this package imports nothing heavy; each public name is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringcore import errors
    from ringcore.admin import AdminClient
    from ringcore.async_engine import AsyncEngine
    from ringcore.config import EngineConfig
    from ringcore.engine_core.core import EngineCore
    from ringcore.host_tensor import HostTensor
    from ringcore.llm import LLM
    from ringcore.logits_processor import LogitsProcessor, LogitsProcessorContext
    from ringcore.outputs import CompletionOutput, RequestOutput
    from ringcore.sampling_params import SamplingParams
    from ringcore.structured_outputs import StructuredOutputsParams

__all__ = [
    "LLM",
    "AdminClient",
    "AsyncEngine",
    "CompletionOutput",
    "EngineConfig",
    "EngineCore",
    "HostTensor",
    "LogitsProcessor",
    "LogitsProcessorContext",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "errors",
]

__version__ = "0.1.0"

_HOME = {
    "LLM": "ringcore.llm",
    "AdminClient": "ringcore.admin",
    "AsyncEngine": "ringcore.async_engine",
    "CompletionOutput": "ringcore.outputs",
    "EngineConfig": "ringcore.config",
    "EngineCore": "ringcore.engine_core.core",
    "HostTensor": "ringcore.host_tensor",
    "LogitsProcessor": "ringcore.logits_processor",
    "LogitsProcessorContext": "ringcore.logits_processor",
    "RequestOutput": "ringcore.outputs",
    "SamplingParams": "ringcore.sampling_params",
    "StructuredOutputsParams": "ringcore.structured_outputs",
}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("ringcore.errors")
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'ringcore' has no attribute {name!r}")
