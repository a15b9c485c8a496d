"""What a layer asks of a matrix product: alone, or with what stands before and behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import torch

__all__ = ["Activation", "Gate", "Norm", "Product"]

Activation = Literal["silu", "gelu_tanh"]


class Norm(Protocol):
    """x / sqrt(mean(x^2) + eps) * gain of every row."""

    eps: float

    @property
    def gain(self) -> torch.Tensor: ...  # [size]

    def __call__(self, x: torch.Tensor, /) -> torch.Tensor: ...


class Gate(Protocol):
    """[n, 2 * size], gate beside up -> activation(gate) * up: [n, size]."""

    @property
    def activation(self) -> Activation: ...

    def __call__(self, gate_up: torch.Tensor, /) -> torch.Tensor: ...


class Product:
    """x W^T + b, and its company one after the other. What can do more at once overrides it."""

    def __init__(self, multiply: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.multiply = multiply

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """x: [n, in] -> [n, out]; in `out`, of any float dtype, where it is given."""
        product = self.multiply(x)
        return product if out is None else out.copy_(product)

    def after_norm(self, norm: Norm, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [n, in] -> the product of the norm of it: [n, out]."""
        return self(norm(hidden))

    def gated_after_norm(self, norm: Norm, hidden: torch.Tensor, gate: Gate) -> torch.Tensor:
        """hidden: [n, in] -> [n, out / 2]."""
        return gate(self.after_norm(norm, hidden))

    def add_to(self, hidden: torch.Tensor, x: torch.Tensor) -> None:
        """hidden [n, out] += the product of x [n, in], in place."""
        hidden.add_(self(x))

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """As self(x), for a sum over ranks: in float32 where that costs nothing."""
        return self(x)
