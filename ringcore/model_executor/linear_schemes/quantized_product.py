"""The product of quantized matrices on their device."""

from __future__ import annotations

import torch

from ringcore.kernels.linears.packed_weight import BLOCK
from ringcore.model_executor import ops
from ringcore.model_executor.linear_schemes.codes import ByteCodes
from ringcore.model_executor.linear_schemes.cpu_product import cpu_product
from ringcore.model_executor.linear_schemes.kernel_product import KernelProduct
from ringcore.model_executor.linear_schemes.product import Product
from ringcore.model_executor.linear_schemes.quantized import QuantizedMatrix
from ringcore.model_executor.linear_schemes.rounded_inputs import InputRounding, RoundedInputs
from ringcore.model_executor.linear_schemes.rounded_product import RoundedProduct
from ringcore.model_executor.linear_schemes.scaled_product import LEAST_CAPABILITY, ScaledProduct
from ringcore.model_executor.linear_schemes.shard import LinearShard

__all__ = ["quantized_product", "row_group"]

_MAX_TOKEN_INPUTS = 32768  # a row that one program rounds


def quantized_product(
    matrix: QuantizedMatrix,
    shard: LinearShard,
    bias: torch.Tensor | None,
    updatable: bool,
    rounding: InputRounding | None = None,
) -> Product:
    """rounding: of the inputs, before the product."""
    if not ops.has_kernels(matrix.scales.device):
        return cpu_product(matrix, bias, shard.dtype, updatable, rounding)
    from ringcore.model_executor.linear_schemes.packed_weight import packed_weight

    weight = packed_weight(matrix, shard.dtype)
    if rounding is None:
        return KernelProduct(weight, bias, derived=matrix.derived)
    group = row_group(matrix, rounding)
    if group is not None:
        return RoundedProduct(weight, bias, group, ScaledProduct.of(matrix, shard.dtype, group), matrix.derived)
    inner = KernelProduct(weight, None, derived=matrix.derived)
    return RoundedInputs(inner, rounding, bias, _scaled(matrix, shard, rounding))


def row_group(matrix: QuantizedMatrix, rounding: InputRounding) -> int | None:
    """Inputs that share a scale, where kernels multiply FP8 by FP8: on tensor cores that do, where weights and rows
    have a scale for each `BLOCK` of inputs, or one for all."""
    form, codes, groups, num_inputs = rounding.format, matrix.codes, matrix.groups, matrix.num_inputs
    if form.number != "fp8" or not isinstance(codes, ByteCodes) or not codes.is_fp8 or not codes.tensor.is_contiguous():
        return None
    has_blocks = groups.are_whole(num_inputs) and groups.size == BLOCK
    if num_inputs % BLOCK or (matrix.scales.shape[1] > 1 and not has_blocks):
        return None
    if torch.cuda.get_device_capability(matrix.scales.device) < LEAST_CAPABILITY:
        return None
    match form.scale:
        case "token":
            return num_inputs if rounding.over_ranks is None and num_inputs <= _MAX_TOKEN_INPUTS else None
        case "group":
            return BLOCK if form.group == BLOCK and rounding.offset == 0 else None
    return None


def _scaled(matrix: QuantizedMatrix, shard: LinearShard, rounding: InputRounding) -> ScaledProduct | None:
    form = rounding.format
    return ScaledProduct.of(matrix, shard.dtype, None) if form.number == "fp8" and form.scale != "group" else None
