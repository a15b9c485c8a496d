"""The linear operation of a layer: alone, or fused with its prologue (norm) and epilogue (gate, residual add)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from ringcore.checkpoint.family import Activation
from ringcore.model_executor.residual import Norm, Residual

__all__ = ["Gate", "LinearOp"]


class Gate(Protocol):
    """[n, 2 * size], gate then up -> activation(gate) * up: [n, size]."""

    @property
    def activation(self) -> Activation: ...

    def __call__(self, gate_up: torch.Tensor, /) -> torch.Tensor: ...


class LinearOp:
    """x W^T + b, with prologue and epilogue as separate operations. Subclasses fuse them."""

    def __init__(self, multiply: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.multiply = multiply

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """x: [n, in] -> [n, out]; in `out`, of any float dtype, where given."""
        product = self.multiply(x)
        return product if out is None else out.copy_(product)

    def after_norm(self, norm: Norm, hidden: Residual) -> torch.Tensor:
        """Prologue: hidden [n, in] -> the linear of its norm: [n, out]."""
        return self(hidden.normed(norm))

    def gated_after_norm(self, norm: Norm, hidden: Residual, gate: Gate) -> torch.Tensor:
        """Prologue and epilogue: hidden [n, in] -> gate(the linear of its norm): [n, out / 2]."""
        return gate(self.after_norm(norm, hidden))

    def add_to(self, hidden: Residual, x: torch.Tensor) -> None:
        """Epilogue: hidden [n, out] += the linear of x [n, in]."""
        hidden.rows.add_(self(x))

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """As self(x), for a sum over ranks: in float32 where that costs nothing."""
        return self(x)
