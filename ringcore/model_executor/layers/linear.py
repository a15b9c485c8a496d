"""Tensor-parallel linears: column-parallel (split by outputs) and row-parallel (split by inputs).

A pair needs one collective: the outputs of a column-parallel layer on each rank are the inputs of the row-parallel
layer after it, whose partial sums are all-reduced over the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ringcore.distributed.parallel import TensorParallel
from ringcore.model_executor.linear_op import Gate, LinearOp
from ringcore.model_executor.packing import pack_linear
from ringcore.model_executor.residual import Norm, Residual
from ringcore.model_executor.weight import Tensors, Weight, WeightedLayer, WeightPart

__all__ = ["ColumnParallelLinear", "OutputSlice", "RowParallelLinear", "merged_outputs", "qkv_outputs"]


@dataclass(frozen=True, slots=True)
class OutputSlice:
    """The outputs of one checkpoint matrix that one rank computes: rows `start` to `start + length` of its weight.

    order: see `WeightPart`.
    """

    checkpoint_name: str  # without ".weight" or ".bias"
    num_outputs: int  # of the whole matrix
    start: int
    length: int
    order: tuple[int, ...] | None = None


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
    """One fused linear for several matrices of the same input, each split by its outputs."""

    def __init__(
        self,
        name: str,
        outputs: Sequence[OutputSlice],
        num_inputs: int,
        *,
        bias: bool,
        dtype: torch.dtype,
    ) -> None:
        self._weight = _stacked(f"{name}.weight", ".weight", outputs, (num_inputs,), dtype)
        self._bias = _stacked(f"{name}.bias", ".bias", outputs, (), dtype) if bias else None
        self._linear: LinearOp

    def weights(self) -> list[Weight]:
        return [self._weight] if self._bias is None else [self._weight, self._bias]

    def bind(self, tensors: Tensors, updatable: bool = False) -> None:
        """Pops its tensors; they are freed where the linear keeps a packed copy."""
        weight = tensors.pop(self._weight.name)
        bias = tensors.pop(self._bias.name) if self._bias is not None else None
        self._linear = pack_linear(weight, bias, updatable)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [n, num_inputs] -> [n, this rank's outputs], in the order of the slices."""
        return self._linear(x)

    def after_norm(self, norm: Norm, hidden: Residual) -> torch.Tensor:
        """self(norm(hidden)), fused where there is a kernel for it."""
        return self._linear.after_norm(norm, hidden)

    def gated_after_norm(self, norm: Norm, hidden: Residual, gate: Gate) -> torch.Tensor:
        """gate(self(norm(hidden))), likewise: [n, half of this rank's outputs]."""
        return self._linear.gated_after_norm(norm, hidden, gate)


def _stacked(
    name: str, suffix: str, outputs: Sequence[OutputSlice], row_shape: tuple[int, ...], dtype: torch.dtype
) -> Weight:
    """One tensor of all slices, concatenated along dim 0."""
    parts = []
    offset = 0
    for part in outputs:
        shape = (part.num_outputs, *row_shape)
        parts.append(WeightPart(part.checkpoint_name + suffix, shape, 0, part.start, part.length, offset, part.order))
        offset += part.length
    return Weight(name, (offset, *row_shape), dtype, tuple(parts), "matrix" if row_shape else "bias")


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
    ) -> None:
        assert num_inputs % tp.size == 0, (name, num_inputs, tp.size)
        length = num_inputs // tp.size
        shape = (num_outputs, num_inputs)
        part = WeightPart(f"{checkpoint_name}.weight", shape, 1, tp.rank * length, length)
        self._weight = Weight(f"{name}.weight", (num_outputs, length), dtype, (part,), "matrix")
        self._bias: Weight | None = None
        if bias:
            bias_part = WeightPart(f"{checkpoint_name}.bias", (num_outputs,), 0, 0, num_outputs)
            self._bias = Weight(f"{name}.bias", (num_outputs,), dtype, (bias_part,), "bias")
        self._tp = tp
        self._linear: LinearOp

    def weights(self) -> list[Weight]:
        return [self._weight] if self._bias is None else [self._weight, self._bias]

    def bind(self, tensors: Tensors, updatable: bool = False) -> None:
        """Pops its tensors; they are freed where the linear keeps a packed copy."""
        bias = tensors.pop(self._bias.name) if self._bias is not None else None
        # The bias is added once, on rank 0.
        self._linear = pack_linear(tensors.pop(self._weight.name), bias if self._tp.rank == 0 else None, updatable)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [n, this rank's inputs] -> [n, num_outputs], equal on every rank."""
        return self._tp.all_reduce(self._linear(x))

    def add_to(self, hidden: Residual, x: torch.Tensor) -> None:
        """hidden [n, num_outputs] += self(x), rounded once where there is a kernel for it."""
        if self._tp.size == 1:
            self._linear.add_to(hidden, x)
        else:
            self._tp.all_reduce_add(self._linear.partial(x), hidden.rows)
