"""One file a model family."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ringcore.families import FAMILIES

if TYPE_CHECKING:
    from ringcore.checkpoint import Families
    from ringcore.model_executor.models.base import CausalLM

__all__ = ["model_class"]


def model_class(architecture: str, families: Families = FAMILIES) -> type[CausalLM]:
    """The class for a `ModelSpec.architecture`. Raises `ModelLoadError` listing the known names."""
    module, _, name = families[architecture].model.partition(":")
    found: type[CausalLM] = vars(importlib.import_module(module))[name]
    return found
