"""One file a model family."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ringcore.families import FAMILIES
from ringcore.model_executor.linear_schemes.dense import all_dense

if TYPE_CHECKING:
    import torch

    from ringcore.checkpoint import Families, ModelSpec
    from ringcore.distributed.parallel import TensorParallel
    from ringcore.model_executor.models.base import CausalLM

__all__ = ["build_model", "model_class"]


def build_model(
    spec: ModelSpec, tp: TensorParallel, dtype: torch.dtype, max_model_len: int, families: Families = FAMILIES
) -> CausalLM:
    """The model of a description on one rank, without weights. Raises `ModelLoadError`."""
    return model_class(spec.architecture, families)(spec, tp, dtype, max_model_len, all_dense)


def model_class(architecture: str, families: Families = FAMILIES) -> type[CausalLM]:
    """The class for a `ModelSpec.architecture`. Raises `ModelLoadError` listing the known names."""
    module, _, name = families[architecture].model.partition(":")
    found: type[CausalLM] = vars(importlib.import_module(module))[name]
    return found
