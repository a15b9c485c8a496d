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
    from ringcore.outputs import CompletionOutput, RequestOutput
    from ringcore.sampling_params import SamplingParams

__all__ = [
    "LLM",
    "AdminClient",
    "AsyncEngine",
    "CompletionOutput",
    "EngineConfig",
    "EngineCore",
    "HostTensor",
    "RequestOutput",
    "SamplingParams",
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
    "RequestOutput": "ringcore.outputs",
    "SamplingParams": "ringcore.sampling_params",
}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("ringcore.errors")
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'ringcore' has no attribute {name!r}")
