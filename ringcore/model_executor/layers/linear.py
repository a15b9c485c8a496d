"""Tensor-parallel linears: column-parallel (split by outputs) and row-parallel (split by inputs).

A pair needs one collective: the outputs of a column-parallel layer on each rank are the inputs of the row-parallel
layer after it, whose partial sums are all-reduced over the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ringcore.attention.context import TokenContext
from ringcore.distributed.parallel import TensorParallel
from ringcore.kernels.partials import Partials
from ringcore.model_executor.linear_schemes.fused import FusedMatrices
from ringcore.model_executor.linear_schemes.product import Gate, Product
from ringcore.model_executor.linear_schemes.scheme import SchemeOf
from ringcore.model_executor.linear_schemes.shard import InputSlice, LinearShard, OutputSlice
from ringcore.model_executor.residual import Norm, Residual
from ringcore.model_executor.weight import Tensors, Weight, WeightedLayer

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "merged_outputs", "qkv_outputs"]


def merged_outputs(checkpoint_names: Sequence[str], num_outputs: int, tp: TensorParallel) -> list[OutputSlice]:
    """An equal share of each of several matrices of `num_outputs` rows, concatenated (gate and up)."""
    assert num_outputs % tp.size == 0, (checkpoint_names, num_outputs, tp.size)
    length = num_outputs // tp.size
    return [OutputSlice(name, num_outputs, tp.rank * length, length) for name in checkpoint_names]


def qkv_outputs(
    checkpoint_names: tuple[str, str, str],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    tp: TensorParallel,
    order: tuple[int, ...] | None = None,
) -> list[OutputSlice]:
    """This rank's heads of q, k and v. With more ranks than KV heads, several ranks hold the same KV head.

    order: [head_dim], of the entries of each head of q and k, as in `WeightPart`.
    """
    heads = num_heads // tp.size
    kv_heads = max(1, num_kv_heads // tp.size)
    first_kv_head = tp.rank * num_kv_heads // tp.size
    assert heads * tp.size == num_heads, (num_heads, tp.size)
    assert num_kv_heads % tp.size == 0 or tp.size % num_kv_heads == 0, (num_kv_heads, tp.size)
    q, k, v = checkpoint_names
    of_kv = num_kv_heads * head_dim, first_kv_head * head_dim, kv_heads * head_dim
    return [
        OutputSlice(q, num_heads * head_dim, tp.rank * heads * head_dim, heads * head_dim, order),
        OutputSlice(k, *of_kv, order),
        OutputSlice(v, *of_kv),
    ]


class ColumnParallelLinear(WeightedLayer):
    """One fused linear for several matrices of the same input, each split by its outputs. scheme_of: see `SchemeOf`."""

    def __init__(
        self,
        name: str,
        outputs: Sequence[OutputSlice],
        num_inputs: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        scheme_of: SchemeOf,
    ) -> None:
        shard = LinearShard(name, tuple(outputs), InputSlice.whole(num_inputs), dtype, bias)
        self._matrices = FusedMatrices(shard, scheme_of)
        self._product: Product

    def weights(self) -> list[Weight]:
        return self._matrices.weights()

    def bind(self, tensors: Tensors, updatable: bool = False) -> None:
        """Pops its tensors; they are freed where the product keeps a packed copy."""
        self._product = self._matrices.bind(tensors, updatable)

    @property
    def product(self) -> Product:
        """Once it is bound."""
        return self._product

    def refresh(self) -> None:
        self._product.refresh()

    def __call__(self, x: torch.Tensor, tokens: TokenContext) -> torch.Tensor:
        """x: [n, num_inputs] -> [n, this rank's outputs], in the order of the slices."""
        return self._product(x, tokens)

    def after_norm(self, norm: Norm, hidden: Residual, tokens: TokenContext) -> torch.Tensor:
        """self(norm(hidden)), fused where there is a kernel for it."""
        return self._product.after_norm(norm, hidden, tokens)

    def gated_after_norm(self, norm: Norm, hidden: Residual, gate: Gate, tokens: TokenContext) -> torch.Tensor:
        """gate(self(norm(hidden))), likewise: [n, half of this rank's outputs]."""
        return self._product.gated_after_norm(norm, hidden, gate, tokens)


class RowParallelLinear(WeightedLayer):
    """A linear split by its inputs; the sum over the ranks is the whole output on each of them."""

    def __init__(
        self,
        name: str,
        checkpoint_name: str,
        num_inputs: int,
        num_outputs: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        tp: TensorParallel,
        scheme_of: SchemeOf,
    ) -> None:
        assert num_inputs % tp.size == 0, (name, num_inputs, tp.size)
        length = num_inputs // tp.size
        outputs = OutputSlice(checkpoint_name, num_outputs, 0, num_outputs)
        inputs = InputSlice(num_inputs, tp.rank * length, length)
        over_ranks = self._max_over_ranks if tp.size > 1 else None
        shard = LinearShard(name, (outputs,), inputs, dtype, bias, max_over_ranks=over_ranks)
        self._matrices = FusedMatrices(shard, scheme_of)
        self._tp = tp
        self._product: Product

    def weights(self) -> list[Weight]:
        return self._matrices.weights()

    def bind(self, tensors: Tensors, updatable: bool = False) -> None:
        """Pops its tensors; they are freed where the product keeps a packed copy."""
        self._product = self._matrices.bind(tensors, updatable, adds_bias=self._tp.rank == 0)

    @property
    def product(self) -> Product:
        """Once it is bound."""
        return self._product

    @property
    def num_ranks(self) -> int:
        return self._tp.size

    def refresh(self) -> None:
        self._product.refresh()

    def _max_over_ranks(self, maxima: torch.Tensor) -> torch.Tensor:
        return self._tp.all_gather_last_dim(maxima).amax(-1, keepdim=True)

    def __call__(self, x: torch.Tensor, tokens: TokenContext) -> torch.Tensor:
        """x: [n, this rank's inputs] -> [n, num_outputs], equal on every rank."""
        return self._tp.all_reduce(self._product(x, tokens))

    def unreduced(self, x: torch.Tensor, tokens: TokenContext) -> Partials:
        """As self(x); of one rank, the splits of a product are yet to be added."""
        return self._product.unreduced(x, tokens) if self._tp.size == 1 else Partials(self(x, tokens)[None])

    def add_to(self, hidden: Residual, x: torch.Tensor, tokens: TokenContext) -> None:
        """hidden [n, num_outputs] += self(x), rounded once where there is a kernel for it."""
        if self._tp.size == 1:
            self._product.add_to(hidden, x, tokens)
        else:
            self._tp.all_reduce_add(self._product.partial(x, tokens), hidden.rows)
