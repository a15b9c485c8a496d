"""The activation of an MLP's gate, and its product with what stands beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from ringcore.model_executor import ops

__all__ = ["Activation", "bind_activation"]

Activation = Literal["silu", "gelu_tanh"]


def bind_activation(activation: Activation, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
    """[n, 2 * size], gate beside up -> activation(gate) * up: [n, size], in the form for `device`."""
    if ops.has_kernels(device):
        from ringcore.kernels import activation as kernels

        return kernels.silu_and_mul if activation == "silu" else kernels.gelu_tanh_and_mul
    return ops.silu_and_mul if activation == "silu" else ops.gelu_tanh_and_mul
