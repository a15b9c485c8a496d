"""Experts whose matrices are quantized: those of all experts of a rank as one `QuantizedMatrix`."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812

from ringcore.kernels.expert_matrices import ExpertWeight
from ringcore.kernels.packed_weight import PackedWeight
from ringcore.model_executor import ops
from ringcore.model_executor.linear_schemes.packed_weight import packed_weight
from ringcore.model_executor.linear_schemes.quantized import QuantizedMatrix
from ringcore.model_executor.linear_schemes.rounded_inputs import InputRounding

__all__ = ["QuantizedExperts"]

_BLOCK = 1 << 18  # numbers that a CPU expands at a time: 1 MiB, which stays in a core's cache


class QuantizedExperts(ExpertWeight):
    """The kernels expand tiles. A CPU expands some outputs of an expert with rows at a time, for each product."""

    def __init__(
        self, matrix: QuantizedMatrix, num_experts: int, dtype: torch.dtype, rounding: InputRounding | None = None
    ) -> None:
        """matrix: the outputs of the experts one after the other. rounding: of the inputs."""
        self._matrix, self.dtype, self.device, self._rounding = matrix, dtype, matrix.scales.device, rounding
        self.shape = num_experts, matrix.num_outputs // num_experts, matrix.num_inputs
        self._stored = packed_weight(matrix, dtype) if ops.has_kernels(self.device) else None

    @property
    def stored(self) -> PackedWeight:
        assert self._stored is not None, "a device without kernels"
        return self._stored

    def rounded(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self._rounding is None else self._rounding.rounded(rows)

    def refresh(self) -> None:
        self._matrix.derived.refresh()

    def numbers(self, experts: torch.Tensor) -> torch.Tensor:
        return torch.stack([self._expanded(expert, 0, self.shape[1]) for expert in experts.tolist()])

    def product(self, rows: torch.Tensor, experts: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        (_, num_outputs, num_inputs), begin = self.shape, 0
        out, step = rows.new_empty(len(rows), num_outputs), max(1, _BLOCK // num_inputs)
        for expert, end in enumerate(ends.tolist()):
            for first in range(0, num_outputs if end > begin else 0, step):
                weights = self._expanded(expert, first, min(first + step, num_outputs)).to(rows.dtype)
                out[begin:end, first : first + step] = F.linear(rows[begin:end], weights)
            begin = end
        return out

    def _expanded(self, expert: int, first: int, end: int) -> torch.Tensor:
        """Of outputs `first` to `end`: [n, num_inputs] float32."""
        before = expert * self.shape[1]
        return self._matrix.expanded(before + first, before + end)
