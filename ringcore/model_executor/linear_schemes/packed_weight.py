"""A quantized matrix as the kernels of a skinny linear and of experts take it."""

from __future__ import annotations

import torch

from ringcore.kernels.packed_weight import (
    BYTES_FP8,
    BYTES_INT8,
    BYTES_UINT8,
    COLUMNS,
    NIBBLES,
    NIBBLES_E2M1,
    PackedWeight,
)
from ringcore.model_executor.linear_schemes.codes import AwqCodes, ByteCodes, E2m1Codes, WordCodes
from ringcore.model_executor.linear_schemes.quantized import QuantizedMatrix

__all__ = ["packed_weight"]


def packed_weight(matrix: QuantizedMatrix, dtype: torch.dtype) -> PackedWeight:
    """Of the same tensors. dtype: of the inputs and the product."""
    codes, groups = matrix.codes, matrix.groups
    columns = None
    match codes:
        case ByteCodes():
            tensor, form = codes.tensor, BYTES_FP8 if codes.is_fp8 else BYTES_INT8
            row_bytes, word_bytes = tensor.stride(0), 4
        case WordCodes():
            tensor, form = codes.words, NIBBLES if codes.bits == 4 else BYTES_UINT8
            row_bytes, word_bytes = (stride * tensor.itemsize for stride in tensor.stride())
            word_bytes = word_bytes if tensor.itemsize == 4 else 4
        case E2m1Codes():
            tensor, form = codes.tensor, NIBBLES_E2M1
            row_bytes, word_bytes = tensor.stride(0), 4
        case AwqCodes():
            tensor, form, columns = codes.words, COLUMNS, codes.columns
            row_bytes, word_bytes = tensor.stride(0) * tensor.itemsize, 4
        case _:
            raise AssertionError(codes)
    return PackedWeight(
        _as_bytes(tensor),
        matrix.scales.view(torch.uint8) if matrix.scales.dtype == torch.float8_e8m0fnu else matrix.scales,
        (matrix.num_outputs, matrix.num_inputs),
        dtype,
        form,
        row_bytes,
        word_bytes,
        groups.size,
        groups.offset,
        matrix.zero,
        matrix.zeros,
        columns,
        groups.index,
    )


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Its first byte is the tensor's; the kernels have its strides."""
    return tensor.view(torch.uint8) if tensor.stride(-1) == 1 else tensor.t().view(torch.uint8)
