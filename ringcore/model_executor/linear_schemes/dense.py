"""Dense matrices: one float tensor each, multiplied by the fastest form for its dtype and device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ringcore.attention.context import TokenContext
from ringcore.checkpoint.matrix_tensors import DENSE, MatrixTensor
from ringcore.model_executor import ops
from ringcore.model_executor.linear_schemes.cpu_packing import Multiply, pack, plain
from ringcore.model_executor.linear_schemes.kernel_product import KernelProduct
from ringcore.model_executor.linear_schemes.product import Product
from ringcore.model_executor.linear_schemes.scheme import LinearScheme
from ringcore.model_executor.linear_schemes.shard import LinearShard

__all__ = ["Dense", "PlainProduct", "all_dense", "dense_product"]


@dataclass(frozen=True, slots=True)
class Dense(LinearScheme):
    """`.weight` [out, in]."""

    @property
    def tensors(self) -> tuple[MatrixTensor, ...]:
        return DENSE

    def product(
        self, shard: LinearShard, tensors: Mapping[str, torch.Tensor], bias: torch.Tensor | None, updatable: bool
    ) -> Product:
        return dense_product(tensors["weight"], bias, updatable, shard.prefers_float32)


def all_dense(checkpoint_name: str) -> LinearScheme:
    """The `SchemeOf` of a dense checkpoint."""
    return Dense()


def dense_product(
    weight: torch.Tensor, bias: torch.Tensor | None, updatable: bool = False, prefers_float32: bool = False
) -> Product:
    """The product x W^T + b for weight [out, in] and bias [out], in the fastest form available on its device.

    A packed form is a copy: a caller that drops `weight` afterwards frees it. updatable: no packed copy; the product
    always uses the current contents of `weight` and `bias`. prefers_float32: the product is float32 where that costs
    nothing. A GPU accumulates in float32 anyway, and then the sums are not rounded to 16 bits on output: two tokens
    whose logits differ in the third digit stay distinct.
    """
    # Not for float32: another summation order there changes a token now and then.
    if ops.has_kernels(weight.device) and weight.dtype in (torch.bfloat16, torch.float16):
        return KernelProduct(weight, bias, torch.float32 if prefers_float32 else None)
    return PlainProduct(plain(weight, bias) if updatable else pack(weight, bias))


class PlainProduct(Product):
    """A product by a function of x alone: prologue and epilogue are separate operations."""

    def __init__(self, multiply: Multiply) -> None:
        self.multiply = multiply

    def __call__(self, x: torch.Tensor, tokens: TokenContext, out: torch.Tensor | None = None) -> torch.Tensor:
        product = self.multiply(x)
        return product if out is None else out.copy_(product)
