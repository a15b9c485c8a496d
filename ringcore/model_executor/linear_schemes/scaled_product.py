"""FP8 weights times FP8 inputs on a GPU's tensor cores: torch's scaled product, for many rows.

It has not run on a GPU. On a CPU the same operator is compared with the expanded product.
"""

from __future__ import annotations

from typing import Self

import torch

from ringcore.model_executor.linear_schemes.codes import ByteCodes
from ringcore.model_executor.linear_schemes.quantized import QuantizedMatrix

__all__ = ["ALIGNMENT", "LEAST_CAPABILITY", "ScaledProduct"]

ALIGNMENT = 16  # bytes, of the rows of both matrices
LEAST_CAPABILITY = (8, 9)  # that has FP8 tensor cores


class ScaledProduct:
    """Of inputs with a scale each, by weights with a scale for each output."""

    MIN_ROWS = 33  # fewer are bound by reading the weights, which the kernels do

    def __init__(self, codes: torch.Tensor, scales: torch.Tensor) -> None:
        """codes: [out, in] float8_e4m3fn; scales: [out, 1] float32."""
        self._codes, self._scales = codes.t(), scales.t()

    @classmethod
    def of(cls, matrix: QuantizedMatrix, dtype: torch.dtype) -> Self | None:
        """None where the operator does not take the matrix, or the device has no such tensor cores."""
        codes, device = matrix.codes, matrix.scales.device
        if not isinstance(codes, ByteCodes) or not codes.is_fp8 or matrix.scales.shape[1] > 1:
            return None
        if dtype != torch.bfloat16 or device.type != "cuda":
            return None
        if any(size % ALIGNMENT for size in codes.shape) or torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
            return None
        return cls(codes.tensor, matrix.scales)

    def __call__(self, codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """codes: [n, in], FP8 numbers in any float dtype; scales: [n, 1], or [1] -> [n, out] of dtype."""
        of_rows = scales.expand(len(codes), 1).contiguous()
        numbers = codes.to(torch.float8_e4m3fn)
        return torch._scaled_mm(numbers, self._codes, scale_a=of_rows, scale_b=self._scales, out_dtype=dtype)
