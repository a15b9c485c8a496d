"""FP8 weights times FP8 inputs on a GPU's tensor cores: torch's scaled product (cuBLAS), for many rows."""

from __future__ import annotations

from typing import Self

import torch

from ringcore.kernels.linears.packed_weight import BLOCK
from ringcore.model_executor.linear_schemes.codes import ByteCodes
from ringcore.model_executor.linear_schemes.quantized import QuantizedMatrix

__all__ = ["LEAST_CAPABILITY", "ScaledProduct"]

_ALIGNMENT = 16  # bytes, of the rows of both matrices
LEAST_CAPABILITY = (8, 9)  # that has FP8 tensor cores
_BLOCKS_SINCE = (9, 0)
_GROUPS_ALIGNMENT = 4  # the number of groups, of blocks


class ScaledProduct:
    """Of inputs with a scale for each row, by weights with one for each output; or of inputs with one for each `BLOCK`
    of a row, by weights with one for each block."""

    ROWS = 16  # cuBLAS takes multiples of it where there are blocks
    MIN_ROWS = 65  # fewer are bound by reading the weights, which the kernels do

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """codes: [out, in] float8_e4m3fn; scales: [out, 1] float32, or [out / BLOCK, in / BLOCK], contiguous."""
        self._codes, self._scales = codes.t(), scales.t()
        self.has_blocks = scales.shape[1] > 1

    @classmethod
    def of(cls, matrix: QuantizedMatrix, dtype: torch.dtype, row_group: int | None) -> Self | None:
        """None where the operator does not take the matrix, or the device has no such tensor cores. row_group: inputs
        of a row that share a scale; None: all."""
        codes, device = matrix.codes, matrix.scales.device
        if not isinstance(codes, ByteCodes) or not codes.is_fp8 or dtype != torch.bfloat16 or device.type != "cuda":
            return None
        capability = torch.cuda.get_device_capability(device)
        if any(size % _ALIGNMENT for size in codes.shape) or capability < LEAST_CAPABILITY:
            return None
        if row_group is None or row_group == matrix.num_inputs:
            return cls(codes.tensor, matrix.scales) if tuple(matrix.scales.shape) == (matrix.num_outputs, 1) else None
        has_blocks = matrix.scale_run == BLOCK == row_group and matrix.scales.shape[1] % _GROUPS_ALIGNMENT == 0
        return cls(codes.tensor, matrix.scales) if has_blocks and capability >= _BLOCKS_SINCE else None

    def __call__(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """codes: [n, in], FP8 numbers in any float dtype; scales: [n, 1], or [1], or of blocks [n, in / BLOCK] ->
        [n, out] of dtype."""
        if self.has_blocks:
            of_rows = scales.t().contiguous().t()  # the groups of a row lie n apart
        else:
            of_rows = scales.expand(len(codes), 1).contiguous()
        numbers = codes.to(torch.float8_e4m3fn)
        return torch._scaled_mm(numbers, self._codes, scale_a=of_rows, scale_b=self._scales, out_dtype=dtype)
