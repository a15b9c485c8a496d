"""MXFP4 experts, as gpt-oss is published: 4-bit floats (e2m1) with a power of 2 for every 32 inputs.

OCP, "Microscaling Formats (MX) Specification" 1.0. Blocks and scales stay where they were loaded, rearranged for
kernels; a product expands them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ringcore.checkpoint.matrix_tensors import MatrixTensor
from ringcore.checkpoint.quantization import Mxfp4Format
from ringcore.kernels.mixtures.expert_matrices import ExpertWeight
from ringcore.model_executor import ops
from ringcore.model_executor.expert_schemes.interleaved_blocks import Interleaved, interleaved_blocks, is_interleaved
from ringcore.model_executor.expert_schemes.kernel_experts import KernelExperts
from ringcore.model_executor.expert_schemes.quantized_experts import QuantizedExperts
from ringcore.model_executor.expert_schemes.scheme import ExpertsScheme
from ringcore.model_executor.linear_schemes.arrangements import E2m1Blocks, ExponentsByGroup, run_of
from ringcore.model_executor.linear_schemes.block_arrangements import ForDevice
from ringcore.model_executor.linear_schemes.codes import Codes, E2m1Codes
from ringcore.model_executor.linear_schemes.quantized import Groups, QuantizedMatrix
from ringcore.model_executor.weight import Arrangement

__all__ = ["Mxfp4Scheme"]

_BLOCKS, _SCALES = E2m1Blocks(run_of(Mxfp4Format.group)), ExponentsByGroup()
_OF_BLOCKS, _OF_SCALES = ForDevice(_BLOCKS, Interleaved("E2M1")), ForDevice(_SCALES, Interleaved("EXPONENTS"))


@dataclass(frozen=True, slots=True)
class Mxfp4Scheme(ExpertsScheme):
    format: Mxfp4Format

    @property
    def tensors(self) -> tuple[MatrixTensor, ...]:
        return self.format.tensors

    def weight(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> ExpertWeight:
        """_blocks: [num_experts, num_outputs, groups, 16] uint8; _scales: [num_experts, num_outputs, groups] uint8."""
        blocks, exponents = tensors["_blocks"], tensors["_scales"]
        if is_interleaved(blocks):
            return KernelExperts(interleaved_blocks(blocks, exponents, dtype), len(blocks), dtype)
        codes: Codes
        if ops.has_kernels(blocks.device):
            codes, scales = _BLOCKS.codes(blocks), _SCALES.scales(exponents)
        else:
            codes, scales = E2m1Codes(blocks.flatten(0, 1).flatten(1)), exponents.flatten(0, 1)
        matrix = QuantizedMatrix(codes, scales.view(torch.float8_e8m0fnu), Groups(self.format.group))
        return QuantizedExperts([matrix], len(blocks), dtype)

    def arrangement(self, suffix: str) -> Arrangement:
        return _OF_BLOCKS if suffix == "_blocks" else _OF_SCALES
