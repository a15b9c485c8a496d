"""Experts whose matrices are dense: one tensor of 16 or 32 bits for a layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from ringcore.kernels.mixtures.expert_matrices import ExpertWeight

__all__ = ["DenseExperts"]

_ALIGNMENT = 16  # bytes, of every row that torch's grouped product takes


class DenseExperts(ExpertWeight):
    def __init__(self, tensor: torch.Tensor, is_transposed: bool = False) -> None:
        """tensor: [num_experts, num_outputs, num_inputs], or [num_experts, num_inputs, num_outputs] where
        is_transposed; used as it is."""
        self._tensor, self.is_transposed = tensor, is_transposed
        self.dtype, self.device = tensor.dtype, tensor.device
        num_experts, num_outputs, num_inputs = self._by_outputs.shape
        self.shape = num_experts, num_outputs, num_inputs

    @property
    def stored(self) -> torch.Tensor:
        return self._tensor

    @property
    def _by_outputs(self) -> torch.Tensor:
        return self._tensor.transpose(1, 2) if self.is_transposed else self._tensor

    def numbers(self, experts: torch.Tensor) -> torch.Tensor:
        return self._by_outputs[experts].float()

    def product(self, rows: torch.Tensor, experts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        by_inputs = self._by_outputs.transpose(1, 2)
        if any(size * self.dtype.itemsize % _ALIGNMENT for size in self.shape[1:]):  # of no published model
            return torch.bmm(rows[:, None], by_inputs[experts])[:, 0]
        return F.grouped_mm(rows.contiguous(), by_inputs, offs=ends)
