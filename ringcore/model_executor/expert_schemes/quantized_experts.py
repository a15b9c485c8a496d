"""Experts whose matrices are quantized: those of all experts of a rank as one `QuantizedMatrix`."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from ringcore.kernels.expert_matrices import ExpertWeight
from ringcore.kernels.packed_weight import PackedWeight
from ringcore.model_executor.linear_schemes.packed_weight import packed_weight
from ringcore.model_executor.linear_schemes.quantized import QuantizedMatrix

__all__ = ["QuantizedExperts"]


class QuantizedExperts(ExpertWeight):
    """The kernels expand tiles. A CPU expands one expert with rows after the other, for each product."""

    def __init__(self, matrix: QuantizedMatrix, num_experts: int, dtype: torch.dtype) -> None:
        """matrix: the outputs of the experts one after the other."""
        self._matrix, self.dtype, self.device = matrix, dtype, matrix.scales.device
        self.shape = num_experts, matrix.num_outputs // num_experts, matrix.num_inputs
        self._stored = packed_weight(matrix, dtype)

    @property
    def stored(self) -> PackedWeight:
        return self._stored

    def numbers(self, experts: torch.Tensor) -> torch.Tensor:
        return torch.stack([self._expanded(expert) for expert in experts.tolist()])

    def product(self, rows: torch.Tensor, experts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        out, begin = rows.new_empty(len(rows), self.shape[1]), 0
        for expert, end in enumerate(ends.tolist()):
            if end > begin:
                out[begin:end] = F.linear(rows[begin:end], self._expanded(expert).to(rows.dtype))
            begin = end
        return out

    def _expanded(self, expert: int) -> torch.Tensor:
        """[num_outputs, num_inputs] float32."""
        num_outputs = self.shape[1]
        return self._matrix.expanded(expert * num_outputs, (expert + 1) * num_outputs)
