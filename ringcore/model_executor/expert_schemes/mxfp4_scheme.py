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
from ringcore.kernels.expert_matrices import ExpertWeight
from ringcore.model_executor import ops
from ringcore.model_executor.expert_schemes.quantized_experts import QuantizedExperts
from ringcore.model_executor.expert_schemes.scheme import ExpertsScheme
from ringcore.model_executor.linear_schemes.arrangements import ByGroup, NibbleRows, run_of
from ringcore.model_executor.linear_schemes.codes import Codes, E2m1Codes, QuadCodes
from ringcore.model_executor.linear_schemes.quantized import Groups, QuantizedMatrix
from ringcore.model_executor.weight import Arrangement

__all__ = ["Mxfp4Scheme"]

_BLOCKS, _SCALES = NibbleRows(Mxfp4Format.group, run_of(Mxfp4Format.group)), ByGroup()


@dataclass(frozen=True, slots=True)
class Mxfp4Scheme(ExpertsScheme):
    format: Mxfp4Format

    @property
    def tensors(self) -> tuple[MatrixTensor, ...]:
        return self.format.tensors

    def weight(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> ExpertWeight:
        """_blocks: [num_experts, num_outputs, groups, 16] uint8; _scales: [num_experts, num_outputs, groups] uint8."""
        blocks, exponents = tensors["_blocks"], tensors["_scales"]
        rows, scales = blocks.flatten(0, 1).flatten(1), exponents.flatten(0, 1)
        codes: Codes = E2m1Codes(rows)
        if ops.has_kernels(blocks.device):
            codes = QuadCodes(rows.view(torch.int16), _BLOCKS.run, 2 * rows.shape[1], is_float=True)
            scales = _SCALES.scales(exponents)
        matrix = QuantizedMatrix(codes, scales.view(torch.float8_e8m0fnu), Groups(self.format.group))
        return QuantizedExperts(matrix, len(blocks), dtype)

    def arrangement(self, suffix: str) -> Arrangement:
        return _BLOCKS if suffix == "_blocks" else _SCALES
