"""The activation of an MLP's gate and its product with the up projection; or the one of an MLP without a gate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from ringcore.checkpoint.family import Activation
from ringcore.model_executor import ops

__all__ = ["BoundGate", "Pointwise", "bind_activation", "pointwise"]

Pointwise = Literal["gelu", "gelu_tanh", "relu", "relu_squared", "silu"]  # of an MLP without a gate


@dataclass(frozen=True, slots=True)
class BoundGate:
    """A gated activation, bound to a device."""

    activation: Activation
    activate_and_multiply: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[n, 2 * size], gate then up -> activation(gate) * up: [n, size]."""
        return self.activate_and_multiply(gate_up)


def bind_activation(activation: Activation, device: torch.device) -> BoundGate:
    if ops.has_kernels(device):
        from ringcore.kernels import activation as kernels

        return BoundGate(activation, kernels.silu_and_mul if activation == "silu" else kernels.gelu_tanh_and_mul)
    of_device = ops.cpu_kernels(device) or ops
    return BoundGate(activation, of_device.silu_and_mul if activation == "silu" else of_device.gelu_tanh_and_mul)


def pointwise(activation: Pointwise) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function, which may overwrite its argument."""
    match activation:
        case "gelu":
            return torch.nn.functional.gelu
        case "gelu_tanh":
            return lambda x: torch.nn.functional.gelu(x, approximate="tanh")
        case "relu":
            return torch.relu_
        case "relu_squared":
            return lambda x: torch.relu_(x).square_()
        case "silu":
            return torch.nn.functional.silu
