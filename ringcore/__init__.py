"""ringcore: an engine that runs large language models.

Importing this package imports nothing heavy; each public name is loaded when it is first used.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ringcore.version import __version__

if TYPE_CHECKING:
    from ringcore import errors
    from ringcore.config import EngineConfig
    from ringcore.engine_core.core import EngineCore
    from ringcore.front_end.admin_client import AdminClient
    from ringcore.front_end.async_engine import AsyncEngine
    from ringcore.front_end.llm import LLM
    from ringcore.front_end.local_engines import local_engines
    from ringcore.params.logits_processor import LogitsProcessor, LogitsProcessorContext
    from ringcore.params.outputs import CompletionOutput, RequestOutput
    from ringcore.params.sampling_params import SamplingParams
    from ringcore.params.structured_outputs import StructuredOutputsParams
    from ringcore.protocol.host_tensor import HostTensor

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
    "__version__",
    "errors",
    "local_engines",
]

logging.getLogger(__name__).addHandler(logging.NullHandler())  # silent unless configured

_HOME = {
    "LLM": "ringcore.front_end.llm",
    "AdminClient": "ringcore.front_end.admin_client",
    "AsyncEngine": "ringcore.front_end.async_engine",
    "CompletionOutput": "ringcore.params.outputs",
    "EngineConfig": "ringcore.config",
    "EngineCore": "ringcore.engine_core.core",
    "HostTensor": "ringcore.protocol.host_tensor",
    "LogitsProcessor": "ringcore.params.logits_processor",
    "LogitsProcessorContext": "ringcore.params.logits_processor",
    "RequestOutput": "ringcore.params.outputs",
    "SamplingParams": "ringcore.params.sampling_params",
    "StructuredOutputsParams": "ringcore.params.structured_outputs",
    "local_engines": "ringcore.front_end.local_engines",
}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("ringcore.errors")
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'ringcore' has no attribute {name!r}")
