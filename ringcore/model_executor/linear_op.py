"""What a layer asks of a matrix product: alone, or with what stands before and behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import torch

from ringcore.model_executor.residual import Norm, Residual

__all__ = ["Activation", "Gate", "LinearOp"]

Activation = Literal["silu", "gelu_tanh"]


class Gate(Protocol):
    """[n, 2 * size], gate beside up -> activation(gate) * up: [n, size]."""

    @property
    def activation(self) -> Activation: ...

    def __call__(self, gate_up: torch.Tensor, /) -> torch.Tensor: ...


class LinearOp:
    """x W^T + b, and its company one after the other. What can do more at once overrides it."""

    def __init__(self, multiply: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.multiply = multiply

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """x: [n, in] -> [n, out]; in `out`, of any float dtype, where it is given."""
        product = self.multiply(x)
        return product if out is None else out.copy_(product)

    def after_norm(self, norm: Norm, hidden: Residual) -> torch.Tensor:
        """hidden: [n, in] -> the product of the norm of it: [n, out]."""
        return self(hidden.normed(norm))

    def gated_after_norm(self, norm: Norm, hidden: Residual, gate: Gate) -> torch.Tensor:
        """hidden: [n, in] -> [n, out / 2]."""
        return gate(self.after_norm(norm, hidden))

    def add_to(self, hidden: Residual, x: torch.Tensor) -> None:
        """hidden [n, out] += the product of x [n, in]."""
        hidden.rows.add_(self(x))

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """As self(x), for a sum over ranks: in float32 where that costs nothing."""
        return self(x)
