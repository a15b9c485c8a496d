"""The product of quantized matrices on their device."""

from __future__ import annotations

import torch

from ringcore.model_executor import ops
from ringcore.model_executor.linear_schemes.expanding_product import cpu_product, integer_product
from ringcore.model_executor.linear_schemes.kernel_product import KernelProduct
from ringcore.model_executor.linear_schemes.product import Product
from ringcore.model_executor.linear_schemes.quantized import QuantizedMatrix
from ringcore.model_executor.linear_schemes.rounded_inputs import InputRounding, RoundedInputs
from ringcore.model_executor.linear_schemes.scaled_product import ScaledProduct
from ringcore.model_executor.linear_schemes.shard import LinearShard

__all__ = ["quantized_product"]


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

        inner = KernelProduct(packed_weight(matrix, shard.dtype), inner_bias, derived=matrix.derived)
    else:
        by_integers = None
        if rounding is not None and rounding.format.number == "int8" and rounding.format.scale != "group":
            by_integers = integer_product(matrix)
        inner = by_integers or cpu_product(matrix, inner_bias, shard.dtype, updatable)
    if rounding is None:
        return inner
    return RoundedInputs(inner, rounding, bias, _scaled(matrix, shard, rounding))


def _scaled(matrix: QuantizedMatrix, shard: LinearShard, rounding: InputRounding) -> ScaledProduct | None:
    form = rounding.format
    return ScaledProduct.of(matrix, shard.dtype) if form.number == "fp8" and form.scale != "group" else None
