"""The product of quantized matrices on their device."""

from __future__ import annotations

import torch

from ringcore.model_executor.linear_schemes.expanding_product import cpu_product
from ringcore.model_executor.linear_schemes.product import Product
from ringcore.model_executor.linear_schemes.quantized import QuantizedMatrix
from ringcore.model_executor.linear_schemes.rounded_inputs import InputRounding, RoundedInputs

__all__ = ["quantized_product"]


def quantized_product(
    matrix: QuantizedMatrix, bias: torch.Tensor | None, updatable: bool, rounding: InputRounding | None = None
) -> Product:
    """rounding: of the inputs, before the product."""
    if rounding is None:
        return cpu_product(matrix, bias, updatable)
    return RoundedInputs(cpu_product(matrix, None, updatable), rounding, bias)
