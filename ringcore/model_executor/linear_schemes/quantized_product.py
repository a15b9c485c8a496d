"""The product of quantized matrices on their device."""

from __future__ import annotations

import torch

from ringcore.model_executor import ops
from ringcore.model_executor.linear_schemes.codes import ByteCodes
from ringcore.model_executor.linear_schemes.expanding_product import cpu_product, integer_product
from ringcore.model_executor.linear_schemes.kernel_product import KernelProduct
from ringcore.model_executor.linear_schemes.product import Product
from ringcore.model_executor.linear_schemes.quantized import QuantizedMatrix
from ringcore.model_executor.linear_schemes.rounded_inputs import InputRounding, RoundedInputs
from ringcore.model_executor.linear_schemes.scaled_product import ALIGNMENT, LEAST_CAPABILITY, ScaledProduct
from ringcore.model_executor.linear_schemes.shard import LinearShard

__all__ = ["quantized_product"]

_TILE_INPUTS = 128  # of the kernels of FP8 times FP8
_ROW_GROUPS = (128, 256, 512, 1024)
_MAX_TOKEN_INPUTS = 32768  # a row that one program rounds


def quantized_product(
    matrix: QuantizedMatrix,
    shard: LinearShard,
    bias: torch.Tensor | None,
    updatable: bool,
    rounding: InputRounding | None = None,
) -> Product:
    """rounding: of the inputs, before the product."""
    inner_bias = bias if rounding is None else None
    inner: Product
    if ops.has_kernels(matrix.scales.device):
        from ringcore.model_executor.linear_schemes.packed_weight import packed_weight

        group = None if rounding is None else _row_group(matrix, rounding)
        if group is not None:
            return KernelProduct(packed_weight(matrix, shard.dtype), bias, derived=matrix.derived, row_group=group)
        inner = KernelProduct(packed_weight(matrix, shard.dtype), inner_bias, derived=matrix.derived)
    else:
        by_integers = None
        if rounding is not None and rounding.format.number == "int8" and rounding.format.scale != "group":
            by_integers = integer_product(matrix)
        inner = by_integers or cpu_product(matrix, inner_bias, shard.dtype, updatable)
    if rounding is None:
        return inner
    return RoundedInputs(inner, rounding, bias, _scaled(matrix, shard, rounding))


def _row_group(matrix: QuantizedMatrix, rounding: InputRounding) -> int | None:
    """Inputs that share a scale, where the kernels multiply FP8 by FP8: on tensor cores that do, and groups of rows and
    weights that tiles of inputs do not cut."""
    form, codes, groups, num_inputs = rounding.format, matrix.codes, matrix.groups, matrix.num_inputs
    if form.number != "fp8" or not isinstance(codes, ByteCodes) or not codes.is_fp8 or not codes.tensor.is_contiguous():
        return None
    if torch.cuda.get_device_capability(matrix.scales.device) < LEAST_CAPABILITY or num_inputs % ALIGNMENT:
        return None
    if matrix.scales.shape[1] > 1 and not (groups.are_whole(num_inputs) and groups.size % _TILE_INPUTS == 0):
        return None
    match form.scale:
        case "token":
            return num_inputs if rounding.over_ranks is None and num_inputs <= _MAX_TOKEN_INPUTS else None
        case "group":
            group = form.group or 0
            is_whole = rounding.offset == 0 and num_inputs % group == 0
            return group if is_whole and group in _ROW_GROUPS else None
    return None


def _scaled(matrix: QuantizedMatrix, shard: LinearShard, rounding: InputRounding) -> ScaledProduct | None:
    form = rounding.format
    return ScaledProduct.of(matrix, shard.dtype) if form.number == "fp8" and form.scale != "group" else None
