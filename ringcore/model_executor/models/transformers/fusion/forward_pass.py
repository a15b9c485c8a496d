"""What a forward pass of a model's body tells its layers and attention calls, and what they tell of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ringcore.attention.context import ForwardContext
from ringcore.attention.layer import Attention
from ringcore.model_executor.layers.rotary import Rotation
from ringcore.model_executor.models.transformers.handed_down import handed_down
from ringcore.model_executor.residual import Residual

__all__ = ["ForwardPass", "pass_of"]


@dataclass(slots=True)
class ForwardPass:
    """An argument that the model hands down."""

    ctx: ForwardContext
    layers: Mapping[nn.Module, Attention]  # by the module that calls, of attention that is the model's own
    rotations: Sequence[Rotation]
    stream: Residual | None = None  # between two of our layers
    is_computed: bool = False  # all of our layers were, by the first
    ended: Residual | None = None  # after the last one of our layers that was computed
    received: torch.Tensor | None = None  # [num_tokens, hidden_size] float32, of the previous stage of a pipeline
    left: torch.Tensor | None = None  # likewise, for the next stage


def pass_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> ForwardPass:
    """That of a layer's call, with these arguments."""
    given: ForwardPass = handed_down(kwargs.get("ringcore"), *args, *kwargs.values())
    return given
