"""ringcore: an engine that runs large language models.

Importing this package imports nothing heavy; each public name is loaded when it is first used.
"""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ringcore.version import __version__

if sys.platform != "linux":
    raise ImportError(
        f"ringcore runs on Linux alone, and this is {sys.platform}: it needs memfd, pidfd, epoll and inherited "
        "descriptors; run it in a Linux container or virtual machine"
    )

if TYPE_CHECKING:
    from ringcore import errors
    from ringcore.config import EngineConfig
    from ringcore.config.engine_args import AsyncEngineArgs, EngineArgs
    from ringcore.engine_core.core import EngineCore
    from ringcore.front_end.admin_client import AdminClient
    from ringcore.front_end.async_engine import AsyncEngine
    from ringcore.front_end.async_engine import AsyncEngine as AsyncLLM
    from ringcore.front_end.async_engine import AsyncEngine as AsyncLLMEngine
    from ringcore.front_end.llm import LLM
    from ringcore.front_end.local_engines import local_engines
    from ringcore.front_end.parking.parked_engines import ParkedEngines
    from ringcore.params.logits_processor import LogitsProcessor, LogitsProcessorContext
    from ringcore.params.outputs import CompletionOutput, RequestOutput
    from ringcore.params.prompts import TextPrompt, TokensPrompt
    from ringcore.params.sampling_params import RequestOutputKind, SamplingParams
    from ringcore.params.structured_outputs import StructuredOutputsParams
    from ringcore.protocol.host_tensor import HostTensor

__all__ = [
    "LLM",
    "AdminClient",
    "AsyncEngine",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "CompletionOutput",
    "EngineArgs",
    "EngineConfig",
    "EngineCore",
    "HostTensor",
    "LogitsProcessor",
    "LogitsProcessorContext",
    "ParkedEngines",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
    "errors",
    "local_engines",
]

logging.getLogger(__name__).addHandler(logging.NullHandler())  # silent unless configured

_HOME = {
    "LLM": "ringcore.front_end.llm",
    "AdminClient": "ringcore.front_end.admin_client",
    "AsyncEngine": "ringcore.front_end.async_engine",
    "AsyncEngineArgs": "ringcore.config.engine_args",
    "CompletionOutput": "ringcore.params.outputs",
    "EngineArgs": "ringcore.config.engine_args",
    "EngineConfig": "ringcore.config",
    "EngineCore": "ringcore.engine_core.core",
    "HostTensor": "ringcore.protocol.host_tensor",
    "LogitsProcessor": "ringcore.params.logits_processor",
    "LogitsProcessorContext": "ringcore.params.logits_processor",
    "ParkedEngines": "ringcore.front_end.parking.parked_engines",
    "RequestOutput": "ringcore.params.outputs",
    "RequestOutputKind": "ringcore.params.sampling_params",
    "SamplingParams": "ringcore.params.sampling_params",
    "StructuredOutputsParams": "ringcore.params.structured_outputs",
    "TextPrompt": "ringcore.params.prompts",
    "TokensPrompt": "ringcore.params.prompts",
    "local_engines": "ringcore.front_end.local_engines",
}

_ALIASES = {"AsyncLLM": "AsyncEngine", "AsyncLLMEngine": "AsyncEngine"}  # vLLM's names


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("ringcore.errors")
    name = _ALIASES.get(name, name)
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    if not name.startswith("_"):
        from ringcore.params.vllm_names import IMPORTS

        if name in IMPORTS:  # no AttributeError, whose text an import statement does not show
            raise ImportError(f"cannot import {name!r}, which is vLLM's, from ringcore: {IMPORTS[name]}", name=name)
    raise AttributeError(f"module 'ringcore' has no attribute {name!r}")
