"""Experts whose matrices are quantized: those of all experts of a rank as one matrix, or one for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F  # noqa: N812

from ringcore.kernels.linears.packed_weight import PackedWeight
from ringcore.kernels.mixtures.expert_matrices import ExpertWeight
from ringcore.model_executor import ops
from ringcore.model_executor.linear_schemes.expanding_product import ExpandableMatrix
from ringcore.model_executor.linear_schemes.packed_weight import packed_weight
from ringcore.model_executor.linear_schemes.quantized import QuantizedMatrix
from ringcore.model_executor.linear_schemes.quantized_product import row_group
from ringcore.model_executor.linear_schemes.rounded_inputs import InputRounding

__all__ = ["ExpandingExperts", "QuantizedExperts"]

_BLOCK = 1 << 18  # numbers that a CPU expands at a time: 1 MiB, which stays in a core's cache


class ExpandingExperts(ExpertWeight):
    """On a CPU: some outputs of an expert with rows are expanded at a time, for each product."""

    def __init__(
        self,
        matrices: Sequence[ExpandableMatrix],
        num_experts: int,
        dtype: torch.dtype,
        device: torch.device,
        rounding: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """matrices: of each expert, or one with the outputs of the experts one after the other. rounding: of the
        inputs."""
        first = matrices[0]
        self._matrices, self.dtype, self.device, self._rounding = matrices, dtype, device, rounding
        self._per_matrix = num_experts // len(matrices)
        self.shape = num_experts, first.num_outputs // self._per_matrix, first.num_inputs
        self.rounds_rows = rounding is not None

    @property
    def stored(self) -> PackedWeight:
        raise AssertionError("for a device with kernels")

    def rounded(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self._rounding is None else self._rounding(rows)

    def refresh(self) -> None:
        for matrix in self._matrices:
            matrix.derived.refresh()

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
        index, of_matrix = divmod(expert, self._per_matrix)
        before = of_matrix * self.shape[1]
        return self._matrices[index].expanded(before + first, before + end)


class QuantizedExperts(ExpandingExperts):
    """As they are bound, on any device: the kernels of a GPU expand tiles of one matrix of all experts."""

    def __init__(
        self,
        matrices: Sequence[QuantizedMatrix],
        num_experts: int,
        dtype: torch.dtype,
        rounding: InputRounding | None = None,
    ) -> None:
        device = matrices[0].scales.device
        super().__init__(matrices, num_experts, dtype, device, None if rounding is None else rounding.rounded)
        self._stored = None
        if ops.has_kernels(device):
            self._stored = packed_weight(matrices[0], dtype)
            self.row_group = None if rounding is None else row_group(matrices[0], rounding)

    @property
    def stored(self) -> PackedWeight:
        assert self._stored is not None, "a device without kernels"
        return self._stored
