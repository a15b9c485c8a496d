"""Decorates the linear schemes of a model: the products are those whose rows do not depend on the batch."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

import torch

from ringcore.attention.context import NO_TOKEN_CONTEXT
from ringcore.checkpoint.matrix_tensors import MatrixTensor
from ringcore.errors import ConfigError
from ringcore.model_executor import ops
from ringcore.model_executor.linear_schemes.cpu_packing import pack_alike, plain
from ringcore.model_executor.linear_schemes.dense import Dense, PlainProduct
from ringcore.model_executor.linear_schemes.invariant_product import (
    ONE_SIZE,
    InvariantProduct,
    agreeing_sizes,
    cancelling,
    random_rows,
)
from ringcore.model_executor.linear_schemes.kernel_product import KernelProduct
from ringcore.model_executor.linear_schemes.product import Product
from ringcore.model_executor.linear_schemes.rounded_inputs import RoundedInputs
from ringcore.model_executor.linear_schemes.rounded_product import RoundedProduct
from ringcore.model_executor.linear_schemes.scheme import LinearScheme
from ringcore.model_executor.linear_schemes.shard import LinearShard
from ringcore.model_executor.weight import Weight

__all__ = ["InvariantScheme"]

_LARGEST = 1 << 28  # numbers of a 16-bit matrix of which another one is made for a comparison


@dataclass(frozen=True, slots=True)
class InvariantScheme(LinearScheme):
    """known: the sizes of calls that agree, by what computes a product and its shape; of all matrices of a model."""

    inner: LinearScheme
    known: dict[Hashable, tuple[int, ...]] = field(compare=False)

    @property
    def tensors(self) -> tuple[MatrixTensor, ...]:
        return self.inner.tensors

    def weights(self, shard: LinearShard) -> dict[str, Weight]:
        return self.inner.weights(shard)

    def product(
        self, shard: LinearShard, tensors: Mapping[str, torch.Tensor], bias: torch.Tensor | None, updatable: bool
    ) -> Product:
        if ops.has_kernels(next(iter(tensors.values())).device):
            return self._on_gpu(shard, tensors, bias, updatable)
        num_inputs, is_dense = shard.inputs.length, isinstance(self.inner, Dense)
        num_outputs = sum(outputs.length for outputs in shard.outputs) + shard.num_padded_outputs
        form = plain if updatable else pack_alike
        product: Product
        if is_dense:
            product = PlainProduct(form(tensors["weight"], bias))
        else:
            product = self.inner.product(shard, tensors, bias, updatable)
        key = self.inner, num_outputs, num_inputs, shard.dtype, bias is None, updatable
        if key not in self.known:
            if shard.dtype == torch.float32:
                sizes = agreeing_sizes(lambda x: product(x, NO_TOKEN_CONTEXT), random_rows(num_inputs))
            elif is_dense and num_outputs * num_inputs <= _LARGEST:
                weight, x = cancelling(num_outputs, num_inputs, shard.dtype)
                zeros = None if bias is None else torch.zeros_like(bias)
                sizes = agreeing_sizes(form(weight, zeros), x)
            else:
                sizes = ONE_SIZE
            self.known[key] = sizes
        return InvariantProduct(product, self.known[key])

    def _on_gpu(
        self, shard: LinearShard, tensors: Mapping[str, torch.Tensor], bias: torch.Tensor | None, updatable: bool
    ) -> Product:
        """Also of float32, which is multiplied by cuBLAS else."""
        if isinstance(self.inner, Dense):
            out_dtype = torch.float32 if shard.prefers_float32 and bias is None else None
            return KernelProduct(tensors["weight"], bias, out_dtype).batch_invariant()
        product = self.inner.product(shard, tensors, bias, updatable)
        if not isinstance(product, (KernelProduct, RoundedProduct, RoundedInputs)):
            raise ConfigError(
                f"deterministic=True: on a GPU the kernels of {shard.name} depend on the number of rows; give another "
                "checkpoint, or deterministic=False",
                option="deterministic",
                value=True,
            )
        return product.batch_invariant()
