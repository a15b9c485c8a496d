"""What a forward pass of a model's body tells its layers and attention calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ringcore.attention.context import ForwardContext
from ringcore.attention.layer import Attention
from ringcore.model_executor.layers.rotary import Rotation
from ringcore.model_executor.residual import Residual

__all__ = ["ForwardPass"]


@dataclass(slots=True)
class ForwardPass:
    """An argument that the model hands down."""

    ctx: ForwardContext
    layers: Mapping[nn.Module, Attention]  # by the module that calls, of attention that is the model's own
    rotations: Sequence[Rotation]
    stream: Residual | None = None  # between two of our layers
    received: torch.Tensor | None = None  # [num_tokens, hidden_size] float32, of the previous stage of a pipeline
    left: torch.Tensor | None = None  # likewise, for the next stage
