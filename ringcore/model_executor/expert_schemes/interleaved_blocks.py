"""MXFP4 blocks on a CPU: 16 outputs interleaved in their own memory for the C kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ringcore.model_executor.linear_schemes.block_arrangements import are_in_blocks
from ringcore.model_executor.linear_schemes.block_kernels import (
    LANES,
    BlockLayout,
    KernelMatrix,
    RunScales,
    block_kernels,
    exact_form,
)
from ringcore.model_executor.weight import Arrangement

__all__ = ["Interleaved", "interleaved_blocks", "is_interleaved"]

_GROUP, _GROUP_BYTES = 32, 16  # inputs of a block, and its codes


def is_interleaved(tensor: torch.Tensor) -> bool:
    """tensor: [num_experts, num_outputs, ...]: whether an expert's outputs are whole runs, for which there are
    kernels."""
    return are_in_blocks(tensor.device) and tensor.shape[1] % LANES == 0


def interleaved_blocks(blocks: torch.Tensor, exponents: torch.Tensor, dtype: torch.dtype) -> KernelMatrix:
    """blocks: [num_experts, num_outputs, groups, 16] uint8; exponents: [num_experts, num_outputs, groups] uint8, both
    interleaved. dtype: of the inputs."""
    kernels = block_kernels()
    assert kernels is not None
    layout = BlockLayout("E2M1", _GROUP, _GROUP_BYTES, exact_form(dtype))
    scales = RunScales(None, exponents.view(-1, exponents.shape[2], LANES), 0)
    return KernelMatrix(kernels, blocks.flatten(0, 1).flatten(1), layout, scales=scales)


@dataclass(frozen=True, slots=True)
class Interleaved(Arrangement):
    """Of [num_experts, num_outputs, ...], where an expert's outputs are whole runs."""

    kind: str  # of the C kernels' blocks

    def is_used_on(self, device: torch.device) -> bool:
        return are_in_blocks(device)

    def arrange(self, tensor: torch.Tensor) -> None:
        self._interleave(tensor, is_restored=False)

    def restore(self, tensor: torch.Tensor) -> None:
        self._interleave(tensor, is_restored=True)

    def _interleave(self, tensor: torch.Tensor, is_restored: bool) -> None:
        kernels = block_kernels()
        if kernels is not None and is_interleaved(tensor):
            num_rows = tensor.shape[0] * tensor.shape[1]
            kernels.interleave(self.kind, tensor.view(num_rows, -1), is_restored)
