"""The products of experts whose rows do not depend on the batch: each expert's rows by themselves, in tiles."""

from __future__ import annotations

import functools

import torch

from ringcore.kernels.linears.packed_weight import PackedWeight
from ringcore.kernels.mixtures.expert_matrices import ExpertWeight
from ringcore.model_executor.linear_schemes.invariant_product import (
    ONE_SIZE,
    agreeing_sizes,
    multiply_in_tiles,
    random_rows,
)

__all__ = ["InvariantExperts"]


class InvariantExperts(ExpertWeight):
    def __init__(self, inner: ExpertWeight) -> None:
        """inner: on a CPU, bound."""
        self._inner = inner
        self.shape, self.dtype, self.device, self.is_transposed = (
            inner.shape,
            inner.dtype,
            inner.device,
            inner.is_transposed,
        )
        self._sizes: tuple[int, ...] = ONE_SIZE
        if self.dtype == torch.float32:
            self._sizes = agreeing_sizes(functools.partial(self._multiply, 0), random_rows(self.shape[2]))

    @property
    def stored(self) -> torch.Tensor | PackedWeight:
        return self._inner.stored

    def rounded(self, rows: torch.Tensor) -> torch.Tensor:
        return self._inner.rounded(rows)

    def numbers(self, experts: torch.Tensor) -> torch.Tensor:
        return self._inner.numbers(experts)

    def refresh(self) -> None:
        self._inner.refresh()

    def product(self, rows: torch.Tensor, experts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        begin, products = 0, []
        for expert, end in enumerate(ends.tolist()):
            if end > begin:
                multiply = functools.partial(self._multiply, expert)
                products.append(multiply_in_tiles(multiply, rows[begin:end], self._sizes))
            begin = end
        return torch.cat(products)

    def _multiply(self, expert: int, rows: torch.Tensor) -> torch.Tensor:
        """By one expert: [n, num_inputs] -> [n, num_outputs]."""
        ends = torch.zeros(self.shape[0], dtype=torch.int32)
        ends[expert:] = len(rows)
        return self._inner.product(rows, torch.full((len(rows),), expert), ends)
