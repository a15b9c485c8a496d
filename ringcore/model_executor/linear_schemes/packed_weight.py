"""A quantized matrix as the kernels of a skinny linear and of experts take it."""

from __future__ import annotations

import torch

from ringcore.kernels.linears.packed_weight import (
    BYTES_FP8,
    BYTES_INT8,
    BYTES_UINT8,
    NIBBLES,
    NIBBLES_E2M1,
    PackedWeight,
)
from ringcore.model_executor.linear_schemes.codes import ByteCodes, E2m1QuadCodes, QuadCodes, WordCodes
from ringcore.model_executor.linear_schemes.quantized import QuantizedMatrix

__all__ = ["packed_weight"]


def packed_weight(matrix: QuantizedMatrix, dtype: torch.dtype) -> PackedWeight:
    """Of the same tensors. dtype: of the inputs and the product."""
    codes, groups, run, is_tiled = matrix.codes, matrix.groups, 1, False
    match codes:
        case ByteCodes():
            tensor, form = codes.tensor.view(torch.uint8), BYTES_FP8 if codes.is_fp8 else BYTES_INT8
        case WordCodes() if codes.bits == 8:
            tensor, form = codes.words.view(torch.uint8), BYTES_UINT8
        case QuadCodes():
            tensor, form, run = codes.words, NIBBLES, codes.run
        case E2m1QuadCodes():
            tensor, form, run, is_tiled = codes.words, NIBBLES_E2M1, codes.run, codes.is_tiled
        case _:
            raise AssertionError(codes)
    assert tensor.stride(1) == 1, tensor.stride()
    return PackedWeight(
        tensor,
        matrix.scales.view(torch.uint8) if matrix.scales.dtype == torch.float8_e8m0fnu else matrix.scales,
        (matrix.num_outputs, matrix.num_inputs),
        dtype,
        form,
        tensor.stride(0),
        groups.size,
        groups.offset,
        matrix.zero,
        matrix.zeros,
        groups.index,
        run,
        is_tiled,
        matrix.has_zero_bits,
        matrix.scale_run,
    )
