"""Experts that stay in the blocks of their GGUF file: multiplied by the C kernels, or expanded for each product."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ringcore.checkpoint.matrix_tensors import Inputs, MatrixTensor, Outputs
from ringcore.checkpoint.quantization import GgufFormat
from ringcore.kernels.mixtures.expert_matrices import ExpertWeight
from ringcore.model_executor.expert_schemes.kernel_experts import KernelExperts
from ringcore.model_executor.expert_schemes.padded_inputs import padded_inputs
from ringcore.model_executor.expert_schemes.quantized_experts import ExpandingExperts
from ringcore.model_executor.expert_schemes.scheme import ExpertsScheme
from ringcore.model_executor.linear_schemes.block_kernels import BlockLayout, KernelMatrix, block_kernels
from ringcore.model_executor.linear_schemes.gguf_blocks import GgufMatrix, round_by_block

__all__ = ["GgufExpertsScheme"]


@dataclass(frozen=True, slots=True)
class GgufExpertsScheme(ExpertsScheme):
    """padding: inputs of the blocks before and after the rank's share. suffix: of the only tensor."""

    format: GgufFormat
    num_experts: int  # of the rank
    padding: tuple[int, int] = (0, 0)
    suffix: str = "_rows"

    @property
    def tensors(self) -> tuple[MatrixTensor, ...]:
        """In terms of its numbers."""
        return (MatrixTensor(self.suffix, (Outputs(), Inputs())),)

    def weight(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> ExpertWeight:
        """Of [outputs of all experts, bytes] uint8, on a CPU; of each expert whole runs, interleaved where there are
        kernels."""
        rows, kernels = tensors[self.suffix], block_kernels()
        weight: ExpertWeight
        if kernels is None:
            rounding = round_by_block if self.format.rounds_inputs else None
            matrix = GgufMatrix(rows, self.format)
            weight = ExpandingExperts([matrix], self.num_experts, dtype, rows.device, rounding)
        else:
            matrix_in_blocks = KernelMatrix(kernels, rows, BlockLayout.of_file(self.format, dtype))
            weight = KernelExperts(matrix_in_blocks, self.num_experts, dtype)
        return padded_inputs(weight, *self.padding)
