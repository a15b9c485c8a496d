"""Experts on a CPU, multiplied by the C kernels: one matrix in blocks, with the outputs of all experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ringcore.kernels.linears.packed_weight import PackedWeight
from ringcore.kernels.mixtures.expert_matrices import ExpertWeight
from ringcore.model_executor.linear_schemes.block_kernels import LANES, KernelMatrix
from ringcore.model_executor.linear_schemes.rounded_inputs import InputRounding
from ringcore.model_executor.weight import Derived

__all__ = ["KernelExperts"]


class KernelExperts(ExpertWeight):
    def __init__(
        self,
        matrix: KernelMatrix,
        num_experts: int,
        dtype: torch.dtype,
        rounding: InputRounding | None = None,
        orders: torch.Tensor | None = None,
        derived: Sequence[Derived] = (),
    ) -> None:
        """matrix: the outputs of the experts one after the other, whole runs of each. rounding: of the inputs, which
        the kernels do not round. orders: [num_experts, num_inputs] int64, in which each expert has its inputs.
        derived: in the order in which they are recomputed."""
        self.shape = num_experts, matrix.num_outputs // num_experts, matrix.num_inputs
        assert self.shape[1] % LANES == 0, self.shape
        self.dtype, self.device = dtype, torch.device("cpu")
        self._matrix, self._rounding, self._orders, self._derived = matrix, rounding, orders, derived

    @property
    def stored(self) -> PackedWeight:
        raise AssertionError("for a device with kernels")

    def rounded(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self._rounding is None else self._rounding.rounded(rows)

    def refresh(self) -> None:
        for one in self._derived:
            one.refresh()

    def numbers(self, experts: torch.Tensor) -> torch.Tensor:
        outputs = experts[:, None] * self.shape[1] + torch.arange(self.shape[1])
        numbers = self._matrix.rows(outputs.flatten()).view(*outputs.shape, -1)
        if self._orders is None:
            return numbers
        return torch.empty_like(numbers).scatter_(2, self._orders[experts, None].expand_as(numbers), numbers)

    def product(self, rows: torch.Tensor, experts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        rows = rows.contiguous() if self._orders is None else rows.gather(1, self._orders[experts])
        return self._matrix.multiply_sorted(rows, ends, rows.new_empty(len(rows), self.shape[1]))
