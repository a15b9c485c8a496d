"""One file a model family."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ringcore.errors import ModelLoadError
from ringcore.registry import MODELS

if TYPE_CHECKING:
    from ringcore.model_executor.models.base import CausalLM

__all__ = ["model_class"]


def model_class(architecture: str) -> type[CausalLM]:
    """The class for an `architectures` name of config.json. Raises `ModelLoadError` listing the known names."""
    if architecture not in MODELS:
        raise ModelLoadError(
            f"architecture {architecture!r} is not known; known: {', '.join(MODELS)}", architecture=architecture
        )
    module, name = MODELS[architecture]
    found: type[CausalLM] = vars(importlib.import_module(module))[name]
    return found
