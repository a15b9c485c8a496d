"""The product of a linear layer: alone, or fused with its prologue (norm) and epilogue (gate, residual add)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch

from ringcore.attention.context import TokenContext
from ringcore.checkpoint.family import Activation
from ringcore.kernels.partials import Partials
from ringcore.model_executor import ops
from ringcore.model_executor.residual import Norm, Residual

__all__ = ["Gate", "Product", "SideBySide"]


class Gate(Protocol):
    """[n, 2 * size], gate then up -> activation(gate) * up: [n, size]."""

    @property
    def activation(self) -> Activation: ...

    def __call__(self, gate_up: torch.Tensor, /) -> torch.Tensor: ...


class Product(ABC):
    """x W^T + b on one rank. A subclass needs `__call__` alone: prologue and epilogue are then separate operations, and
    it overrides what it fuses.

    tokens: the context of the rows of x, or of the residual stream: a product may depend on it row by row.
    """

    @abstractmethod
    def __call__(self, x: torch.Tensor, tokens: TokenContext, out: torch.Tensor | None = None) -> torch.Tensor:
        """x: [n, in] -> [n, out]; in `out`, of any float dtype, where given."""

    def after_norm(self, norm: Norm, hidden: Residual, tokens: TokenContext) -> torch.Tensor:
        """Prologue: hidden [n, in] -> the product of its norm: [n, out]."""
        return self(hidden.normed(norm), tokens)

    def gated_after_norm(self, norm: Norm, hidden: Residual, gate: Gate, tokens: TokenContext) -> torch.Tensor:
        """Prologue and epilogue: hidden [n, in] -> gate(the product of its norm): [n, out / 2]."""
        return gate(self.after_norm(norm, hidden, tokens))

    def add_to(self, hidden: Residual, x: torch.Tensor, tokens: TokenContext) -> None:
        """Epilogue: hidden [n, out] += the product of x [n, in]."""
        hidden.rows.add_(self(x, tokens))

    def unreduced(self, x: torch.Tensor, tokens: TokenContext) -> Partials:
        """self(x), whose splits a norm adds while it reads them."""
        return Partials(self(x, tokens)[None])

    def partial(self, x: torch.Tensor, tokens: TokenContext) -> torch.Tensor:
        """As self(x), for a sum over ranks: in float32 where that costs nothing."""
        return self(x, tokens)

    @property
    def unsearched(self) -> Product:
        """This one, or that of which a search chooses the tiles."""
        return self

    def refresh(self) -> None:  # noqa: B027 - most derive nothing
        """The contents of the bound tensors have changed: recomputes what was derived from them, at the same
        addresses."""


class SideBySide(Product):
    """Several products of the same x, concatenated: a fused layer whose matrices are of different schemes."""

    def __init__(self, products: Sequence[Product], sizes: Sequence[int]) -> None:
        """sizes: the outputs of each."""
        self._products, self._sizes = products, list(sizes)

    def __call__(self, x: torch.Tensor, tokens: TokenContext, out: torch.Tensor | None = None) -> torch.Tensor:
        if ops.has_kernels(x.device):  # which write whole rows
            together = torch.cat([product(x, tokens) for product in self._products], -1)
            return together if out is None else out.copy_(together)
        out = x.new_empty(len(x), sum(self._sizes)) if out is None else out
        for product, part in zip(self._products, torch.split_with_sizes(out, self._sizes, 1), strict=True):
            product(x, tokens, part)
        return out

    def refresh(self) -> None:
        for product in self._products:
            product.refresh()
