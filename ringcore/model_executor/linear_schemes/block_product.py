"""The product of a matrix in blocks by the C kernels: norm, gate and sum are in the same call."""

from __future__ import annotations

import torch

from ringcore.attention.context import TokenContext
from ringcore.model_executor.linear_schemes.block_kernels import LANES, KernelMatrix
from ringcore.model_executor.linear_schemes.product import Gate, Product
from ringcore.model_executor.residual import Norm, Residual
from ringcore.model_executor.weight import Derived

__all__ = ["BlockProduct"]


class BlockProduct(Product):
    """Sums are in float32, and rounded once to the dtype of the inputs."""

    def __init__(
        self, matrix: KernelMatrix, dtype: torch.dtype, derived: Derived | None, order: torch.Tensor | None = None
    ) -> None:
        """dtype: the layer's. In 16 bits norm and gate round their results, so they stay operations of their own.
        derived: what the matrix has beside its rows; None: nothing changes. order: in which it has its inputs."""
        self._matrix, self._derived, self._order = matrix, derived, order
        self._fuses = dtype == torch.float32 and order is None
        self._fuses_gate = self._fuses and matrix.num_outputs % (2 * LANES) == 0

    def __call__(self, x: torch.Tensor, tokens: TokenContext, out: torch.Tensor | None = None) -> torch.Tensor:
        if out is not None and out.stride(1) == 1:
            return self._matrix.multiply(self._rows(x), out)
        product = self._product(self._rows(x))
        return product if out is None else out.copy_(product)

    def after_norm(self, norm: Norm, hidden: Residual, tokens: TokenContext) -> torch.Tensor:
        if not self._fuses or norm.gain is None:
            return super().after_norm(norm, hidden, tokens)
        return self._product(hidden.rows, norm.gain, norm.eps)

    def gated_after_norm(self, norm: Norm, hidden: Residual, gate: Gate, tokens: TokenContext) -> torch.Tensor:
        if not self._fuses_gate or norm.gain is None or gate.activation != "silu":
            return super().gated_after_norm(norm, hidden, gate, tokens)
        rows = hidden.rows
        gated = rows.new_empty(len(rows), self._matrix.num_outputs // 2)
        return self._matrix.multiply(rows, gated, "silu", norm.gain, norm.eps)

    def add_to(self, hidden: Residual, x: torch.Tensor, tokens: TokenContext) -> None:
        self._matrix.multiply(self._rows(x), hidden.rows, "add")

    def refresh(self) -> None:
        if self._derived is not None:
            self._derived.refresh()

    def _product(self, x: torch.Tensor, gain: torch.Tensor | None = None, eps: float = 0.0) -> torch.Tensor:
        return self._matrix.multiply(x, x.new_empty(len(x), self._matrix.num_outputs), "store", gain, eps)

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        if self._order is not None:
            return x.index_select(1, self._order)
        return x if x.stride(1) == 1 else x.contiguous()
