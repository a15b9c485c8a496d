"""Whether one row of a model's 4-bit linears is multiplied by `int8_gemv`: of all of them, or of none."""

from __future__ import annotations

from collections.abc import Sequence

from ringcore.model_executor.layers.linear import ColumnParallelLinear, RowParallelLinear
from ringcore.model_executor.linear_schemes.kernel_product import KernelProduct
from ringcore.model_executor.models.mixture import Experts
from ringcore.model_executor.weight import WeightedLayer

__all__ = ["agree_on_int8_gemv"]


def agree_on_int8_gemv(layers: Sequence[WeightedLayer]) -> None:
    """layers: bound, all that a stage has.

    These kernels take all shared memory of an SM, the others leave most of it to the L1 cache, and an SM drains between
    the two: a layer of Qwen3-8B with one kernel of the other kind takes 5 to 12 us more on an H200, where `int8_gemv`
    gains 1.1.
    """
    linears = [layer for layer in layers if isinstance(layer, ColumnParallelLinear | RowParallelLinear)]
    products = [linear.product for linear in linears]
    found = [product for product in products if isinstance(product, KernelProduct) and product.has_int8_gemv]
    if len(found) < len(products) or any(isinstance(layer, Experts) for layer in layers):
        return
    for product in found:
        product.use_int8_gemv()
